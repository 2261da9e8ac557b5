"""SGLang's and vLLM's drafting by an adapter in Uno's format, on Transformers and peft alone.

Written from their documentation and published code (SGLang 0.5.20, vLLM's PR 55947); nothing
of this project is imported, so what agrees with it agrees with the format.

    draft      seed  q  q  q     by base weights the token after the seed, by the adapter
               base  adapter     drafts for the places after that; causal
    verify     root  d  d  d     by base weights; or a tree of drafts under the root

Both forwards of a server are here two and one: rows of one forward cannot have different
adapters in peft, and the seed's row sees none of the noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

#: From a text's length with the seed, and a count, to the tokens of noise.
Noise = Callable[[int, int], Sequence[int]]
Node = tuple[int, int]  # a parent's index and a token; the root has the index 0


@dataclass(frozen=True)
class UnoServer:
    """A base model with the adapter of a folder.

    `rows` is F, the rows of a draft's forward. With `candidates` above 1 drafts are a tree
    of `nodes` nodes, the root among them. `leaders` likeliest tokens of a place share its
    probability; by default, as in SGLang, all tokens do.
    """

    model: PeftModel
    rows: int
    candidates: int = 1
    nodes: int = 0
    leaders: int | None = None

    @classmethod
    def load(cls, base: PreTrainedModel, folder: Path, **shape: Any) -> "UnoServer":
        return cls(PeftModel.from_pretrained(base, str(folder)).eval(), **shape)

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], noise: Noise, *, tokens: int
    ) -> tuple[list[int], list[int]]:
        """Return `tokens` or a few more new tokens, and each cycle's accepted drafts."""
        text, cache = list(prompt), DynamicCache()
        accepted = []
        while len(text) < len(prompt) + tokens:
            root, drafts = self._draft(text, cache, noise)
            path, correction = self._verify(root, drafts, cache)
            text += [root, *path, correction]
            accepted.append(len(path))
        return text[len(prompt) :], accepted

    def _draft(
        self, text: Sequence[int], cache: DynamicCache, noise: Noise
    ) -> tuple[int, list[Node]]:
        with self.model.disable_adapter():
            logits = self._logits(text[cache.get_seq_length() :], cache)
        count = self.rows - 1
        of_noise = self._logits(noise(len(text), count), cache)
        cache.crop(-count)
        if self.candidates == 1:
            chain = of_noise.argmax(-1).tolist()
            return int(logits[-1].argmax()), list(enumerate(chain))
        return int(logits[-1].argmax()), self._tree(of_noise)

    def _tree(self, logits: Tensor) -> list[Node]:
        """Return the likeliest nodes under the root: of all paths, by joint probability."""
        top = logits.topk(min(self.leaders or logits.shape[1], logits.shape[1]))
        chances = top.values.float().log_softmax(-1)[:, : self.candidates].tolist()
        ids = top.indices[:, : self.candidates].tolist()
        nodes: list[Node] = []
        mass, depth = [0.0], [0]
        open_edges = {(0, rank) for rank in range(len(ids[0]))}
        while open_edges and len(mass) < self.nodes:
            parent, rank = max(
                open_edges,
                key=lambda edge: (
                    mass[edge[0]] + chances[depth[edge[0]]][edge[1]],
                    -depth[edge[0]],
                    -edge[1],
                ),
            )
            open_edges.remove((parent, rank))
            place = depth[parent]
            nodes.append((parent, ids[place][rank]))
            mass.append(mass[parent] + chances[place][rank])
            depth.append(place + 1)
            if place + 1 < len(ids):
                open_edges |= {(len(nodes), other) for other in range(len(ids[0]))}
        return nodes

    def _verify(
        self, root: int, drafts: Sequence[Node], cache: DynamicCache
    ) -> tuple[list[int], int]:
        """Return the accepted drafts, and the base model's token after them."""
        past, q = cache.get_seq_length(), 1 + len(drafts)
        depths = [0]
        sees = torch.eye(q, dtype=torch.bool)
        for node, (parent, _) in enumerate(drafts, start=1):
            depths.append(depths[parent] + 1)
            sees[node] |= sees[parent]
        mask = torch.cat([torch.ones(q, past, dtype=torch.bool), sees], dim=1)
        with self.model.disable_adapter():
            logits = self._logits(
                [root, *(token for _, token in drafts)],
                cache,
                attention_mask=mask[None, None],
                position_ids=past + torch.tensor([depths]),
            )
        cache.crop(-q)
        choices = logits.argmax(-1).tolist()
        at, path = 0, []
        for node, (parent, token) in enumerate(drafts, start=1):
            if parent == at and token == choices[at]:
                at = node
                path.append(token)
        return path, choices[at]

    def _logits(
        self, ids: Sequence[int], cache: DynamicCache, **inputs: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=torch.tensor([list(ids)]),
            past_key_values=cache,
            use_cache=True,
            **inputs,
        )
        logits: Tensor = output.logits[0]
        return logits
