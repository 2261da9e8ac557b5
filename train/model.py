"""Build the trained module: a Transformers model with the loss of a layout."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from conf.architecture import attention_dropout, logit_scale, windows
from conf.runs.stage import partial_of
from data_prep.vocab import TOKENIZER, Vocab, copy_tokenizer
from train.attention import Mask, TrunkKeys, branch_kernel, branch_masks
from train.config import ADAPTIVE, TrainConfig
from train.head import PreviousTokenHead
from train.initial_adapter import start_from
from train.lora import Gate, adapt
from train.loss import draft_loss, tally
from train.objective import IGNORE
from train.pretrained import load_trainable
from train.trunks import Trunk, TrunkCache, trunk_cache


class AdaptiveLM(nn.Module):
    """A Transformers model, `lm`, with the loss of a layout.

    At most `chunk` positions have logits at once. `attention` is objective.attention.
    objective.soft, the attribute `soft`, counts only while gradients are enabled. With a
    `gate` the adapter acts on the branches only: a separate pass without gradient and
    adapter computes the trunk, and the branches attend to its keys and values, as they
    attend to the cache in decoding. `trunks` caches such passes.
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
        """Return the loss of a Layout, its tally (L + 1, 4), and its likeliest tokens (r, c)."""
        hidden = self.encode(ids, offsets, positions, trunk)
        if self._gate is not None and torch.is_grad_enabled():
            # Standard tokens have no trained weights, so they need no loss.
            labels = labels.masked_fill(offsets == 0, IGNORE)
        corrected = None
        if self.head is not None and trunk < ids.shape[1]:
            # An adaptive token replaces a token of the text, and predicts the one after it.
            previous = ids[:, :trunk].gather(1, positions[:, trunk:])
            with torch.no_grad():
                embedded = self.lm.get_input_embeddings()(previous)
            branches = self.head(hidden[:, trunk:], embedded)
            corrected = torch.cat([hidden[:, :trunk], branches], dim=1)
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
        """Return the results of `forward` from the hidden states of `encode`.

        `corrected` (r, c, d) are the hidden states after the previous-token head.
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
        """Return the last hidden states (r, c, d) for the (r, c) tensors of a Layout.

        They are multiplied by the model's scale of logits.
        """
        self.train(torch.is_grad_enabled())  # validation disables dropout
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
        """Return the base model's last hidden states of a trunk, and its keys and values.

        They are computed without dropout, as in decoding.
        """
        assert self._gate is not None
        keys = TrunkKeys()
        training = self.training
        self.eval()
        with self._gate.closed():
            hidden = self._decode(ids, positions, None, trunk_keys=keys)
        self.train(training)
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


def build_module(
    config: TrainConfig, architecture: PretrainedConfig, vocab: Vocab
) -> tuple[AdaptiveLM, int]:
    """Return the module for the engine, and the number of parameters of the base model.

    Every rank must call this.
    """
    # Imported late: an export imports this module and does not need DeepSpeed.
    from train.engine import count_parameters, gathered, load_partitioned

    objective, model = config.objective, config.model
    # A validation alone is over before the compiler is.
    if config.steps == 0 and config.minutes is None:
        model = replace(model, compile=False)
    with load_partitioned(config):
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        lm = load_trainable(
            model,
            architecture,
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
    gate = Gate(lm) if config.lora.gated else None
    head = None
    if objective.previous_token:
        torch.manual_seed(config.seed)
        width = lm.get_output_embeddings().in_features
        head = PreviousTokenHead(width, lm.dtype)
    if folders := config.model.adapter_folders:
        # objective.mask may train without a head what began with one.
        with_head = head is not None or objective.mask is None
        gated = config.lora.gated
        start_from(folders, lm, head, with_head=with_head, gated=gated)
    module = AdaptiveLM(
        lm,
        chunk=config.loss_chunk,
        L=objective.L,
        gate=gate,
        attention=objective.attention,
        head=head,
        trunks=trunk_cache(config),
    )
    return module, parameters


def write_architecture(lm: Any, data: Path, out: Path) -> None:
    """Write the model's configuration and tokenizer for an export, unless `out` exists.

    `data` is the folder of shards that has the tokenizer.
    """
    if out.is_dir():
        return
    partial = partial_of(out)
    shutil.rmtree(partial, ignore_errors=True)
    # Do not copy file modes: the data may be read-only.
    partial.mkdir()
    copy_tokenizer(data / TOKENIZER, partial)
    lm.config.save_pretrained(partial)
    if lm.generation_config is not None:
        # save_pretrained refuses published files, such as a temperature without do_sample.
        lm.generation_config.to_json_file(partial / GENERATION_CONFIG_NAME)
    os.rename(partial, out)
