"""Draft like SGLang and vLLM with an adapter in Uno's format, using only Transformers and peft.

The code follows their documentation and sources (SGLang 0.5.20, vLLM's PR 55947) and does not
import this project. So if both give the same drafts, this project follows the format.

    draft      seed  q  q  q     base weights predict the token after the seed; the adapter
               base  adapter     drafts the positions after that; causal
    verify     root  d  d  d     base weights; a chain or a tree of drafts after the root

A server drafts in one forward. Here it takes two, because peft cannot use different adapters for
rows of one forward. The result is the same: the seed's row does not attend to noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

#: Takes the length of the text including the seed, and a count; returns the tokens of noise.
Noise = Callable[[int, int], Sequence[int]]
Node = tuple[int, int]  # the index of the parent, and a token; the root has index 0


@dataclass(frozen=True)
class UnoServer:
    """A base model with the adapter of a folder.

    `rows` is F, the number of rows in the draft forward. With `candidates` above 1 the drafts are
    a tree of `nodes` nodes, including the root. Probabilities are over the `leaders` likeliest
    tokens of a position; by default over all tokens, as in SGLang.
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
        """Return at least `tokens` new tokens, and the number of accepted drafts in each cycle."""
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
        """Return the token after the text, and drafts after that token."""
        with self.model.disable_adapter():
            logits = self._logits(text[cache.get_seq_length() :], cache)
        count = self.rows - 1
        draft_logits = self._logits(noise(len(text), count), cache)
        cache.crop(-count)
        if self.candidates == 1:
            chain = draft_logits.argmax(-1).tolist()
            return int(logits[-1].argmax()), list(enumerate(chain))
        return int(logits[-1].argmax()), self._tree(draft_logits)

    def _tree(self, logits: Tensor) -> list[Node]:
        """Return the nodes with the largest joint probability of their path from the root."""
        top = logits.topk(min(self.leaders or logits.shape[1], logits.shape[1]))
        log_p = top.values.float().log_softmax(-1)[:, : self.candidates].tolist()
        ids = top.indices[:, : self.candidates].tolist()
        nodes: list[Node] = []
        path_log_p, depth = [0.0], [0]
        open_edges = {(0, rank) for rank in range(len(ids[0]))}
        while open_edges and len(path_log_p) < self.nodes:
            parent, rank = max(
                open_edges,
                key=lambda edge: (
                    path_log_p[edge[0]] + log_p[depth[edge[0]]][edge[1]],
                    -depth[edge[0]],
                    -edge[1],
                ),
            )
            open_edges.remove((parent, rank))
            row = depth[parent]
            nodes.append((parent, ids[row][rank]))
            path_log_p.append(path_log_p[parent] + log_p[row][rank])
            depth.append(row + 1)
            if row + 1 < len(ids):
                open_edges |= {(len(nodes), other) for other in range(len(ids[0]))}
        return nodes

    def _verify(
        self, root: int, drafts: Sequence[Node], cache: DynamicCache
    ) -> tuple[list[int], int]:
        """Return the accepted drafts, and the base model's next token."""
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
        last, path = 0, []
        for node, (parent, token) in enumerate(drafts, start=1):
            if parent == last and token == choices[last]:
                last = node
                path.append(token)
        return path, choices[last]

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
