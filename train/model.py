"""The trained module: the library's model under the loss of a layout."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.architecture import attention_dropout, logit_scale, windows
from conf.runs.stage import partial_of
from data_prep.vocab import TOKENIZER, Vocab
from train.attention import Mask, TrunkKeys, branch_kernel, branch_masks
from train.config import ADAPTIVE, TrainConfig
from train.head import PreviousTokenHead, read_head
from train.lora import Gate, adapt, begin_with
from train.loss import draft_loss, tally
from train.objective import IGNORE
from train.pretrained import load_trainable
from train.trunks import Trunk, TrunkCache, trunk_cache


class AdaptiveLM(nn.Module):
    """The library's model, `lm`, under the loss.

    `chunk` positions have logits at once. `attention` is objective.attention;
    objective.`soft` counts while gradients are enabled. With a `gate` the adapter acts
    on the branches alone: the trunk is a pass of its own, without gradient and adapter,
    whose keys and values the branches attend to, as decoding's cache holds them. `trunks`
    keeps such passes.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        chunk: int,
        L: int,
        gate: Gate | None = None,
        attention: str = "auto",
        head: PreviousTokenHead | None = None,
        trunks: TrunkCache | None = None,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.head = head
        self.soft = 0.0
        self._chunk = chunk
        self._L = L
        self._gate = gate
        self._attention = attention
        self._trunks = trunks
        self._scale = logit_scale(lm.config)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        offsets: Tensor,
        weights: Tensor,
        positions: Tensor,
        teachers: Tensor,
        trunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a Layout's loss, its tally (L + 1, 4), and likeliest tokens (r, c)."""
        hidden = self.encode(ids, offsets, positions, trunk)
        if self._gate is not None and torch.is_grad_enabled():
            # No weight learns from standard tokens.
            labels = labels.masked_fill(offsets == 0, IGNORE)
        corrected = None
        if self.head is not None and trunk < ids.shape[1]:
            # The token in an adaptive token's place comes before the one it predicts.
            previous = ids[:, :trunk].gather(1, positions[:, trunk:])
            with torch.no_grad():
                embedded = self.lm.get_input_embeddings()(previous)
            ours = self.head(hidden[:, trunk:], embedded)
            corrected = torch.cat([hidden[:, :trunk], ours], dim=1)
        return self.score(hidden, labels, offsets, weights, teachers, corrected)

    def score(
        self,
        hidden: Tensor,
        labels: Tensor,
        offsets: Tensor,
        weights: Tensor,
        teachers: Tensor,
        corrected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `forward` from `encode`'s hidden states.

        `corrected` (r, c, d) are these with the head's for adaptive tokens.
        """
        head: Any = self.lm.get_output_embeddings()
        loss, losses, predicted = draft_loss(
            hidden.flatten(0, 1),
            head.weight,
            labels.flatten(),
            weights.flatten(),
            chunk=self._chunk,
            teachers_T=teachers.flatten(),
            soft=self.soft if torch.is_grad_enabled() else 0.0,
            corrected_Td=None if corrected is None else corrected.flatten(0, 1),
            bias_V=head.bias,
        )
        losses = losses.view_as(labels)
        predicted = predicted.view_as(labels)
        return loss, tally(losses, predicted, labels, offsets, L=self._L), predicted

    def encode(
        self, ids: Tensor, offsets: Tensor, positions: Tensor, trunk: int
    ) -> Tensor:
        """Return the (r, c, d) last hidden states of a Layout's (r, c) tensors.

        The model's scale of logits is in them.
        """
        self.train(torch.is_grad_enabled())  # no dropout in a validation
        mask = self._mask(positions, offsets, trunk)
        if self._gate is None:
            return self._decode(ids, positions, mask)
        if self._trunks is None:
            standard, keys = self._frozen(ids[:, :trunk], positions[:, :trunk])
        else:
            standard, keys = self._trunks.get(
                ids[:, :trunk], positions[:, :trunk], self._frozen
            )
        if mask is None:
            return standard
        branches = self._decode(
            ids[:, trunk:], positions[:, trunk:], mask, trunk_keys=keys
        )
        return torch.cat([standard, branches], dim=1)

    @torch.no_grad()
    def _frozen(self, ids: Tensor, positions: Tensor) -> Trunk:
        """Return the base model's last hidden states of a trunk, and its keys."""
        assert self._gate is not None
        keys: TrunkKeys = {}
        with self._gate.closed():
            hidden = self._decode(ids, positions, None, trunk_keys=keys)
        return hidden, keys

    def _decode(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Mask | dict[str, Mask] | None,
        **kwargs: TrunkKeys,
    ) -> Tensor:
        output = self.lm.get_decoder()(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            **kwargs,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden if self._scale == 1 else hidden * self._scale

    def _mask(
        self, positions: Tensor, offsets: Tensor, trunk: int
    ) -> Mask | dict[str, Mask] | None:
        dropout = attention_dropout(self.lm.config)
        kernel = branch_kernel(self._attention, positions.device.type, dropout=dropout)
        kinds = windows(self.lm.config)
        return branch_masks(positions, offsets, trunk, kinds, kernel)


def assemble(config: TrainConfig, vocab: Vocab) -> tuple[AdaptiveLM, int]:
    """Return the module for the engine, and the number of the model's own parameters.

    Called by every rank.
    """
    # Imported late: an export needs this module, and no DeepSpeed.
    from train.engine import count_parameters, gathered, load_partitioned

    objective = config.objective
    with load_partitioned(config):
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        lm = load_trainable(
            config.model,
            vocab=vocab,
            dtype=dtype,
            seed=config.seed,
            grows=objective.described_mask in (None, ADAPTIVE),
        )
    parameters = count_parameters(lm)
    if config.lora.rank:
        with gathered(lm.get_input_embeddings(), lm.get_output_embeddings()):
            adapt(
                lm,
                config.lora,
                adaptive=objective.adaptive_ids(vocab.adaptive),
                seed=config.seed,
            )
    if folder := config.model.adapter_folder:
        begin_with(lm, folder)
    gate = Gate(lm) if config.lora.gated else None
    head = None
    if objective.previous_token:
        torch.manual_seed(config.seed)
        width = lm.get_output_embeddings().in_features
        head = PreviousTokenHead(width, lm.dtype)
    if folder:
        read_head(head, folder)
    module = AdaptiveLM(
        lm,
        chunk=config.loss_chunk,
        L=objective.L,
        gate=gate,
        attention=objective.attention,
        head=head,
        trunks=trunk_cache(lm, config),
    )
    return module, parameters


def describe(lm: Any, data: Path, out: Path) -> None:
    """Write architecture and tokenizer, for an export, unless a run has written them."""
    if out.is_dir():
        return
    partial = partial_of(out)
    shutil.rmtree(partial, ignore_errors=True)
    # Without the files' modes: the data may be read-only.
    partial.mkdir()
    for path in (data / TOKENIZER).iterdir():
        shutil.copyfile(path, partial / path.name)
    lm.config.save_pretrained(partial)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(partial)
    os.rename(partial, out)
