"""Read a finished training folder for an export."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from conf.architecture import skeleton, why_unsupported
from conf.console import print_line
from conf.errors import UserError
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import read_manifest
from data_prep.ngrams import TABLE, find_table
from data_prep.vocab import Vocab, tokenizer_file
from train.checkpoint import (
    Checkpoint,
    check_frozen,
    find_intact,
    list_checkpoints,
)
from train.config import CHECKPOINTS, DESCRIBED, FROZEN, LoraSettings
from train.export import trained_lora
from train.export.weights import CheckpointWeights
from train.lora import PlainWeights


@dataclass(frozen=True)
class Trained:
    """A training folder, its manifest, and its newest intact checkpoint."""

    folder: Path
    manifest: dict[str, Any]
    checkpoint: Checkpoint
    vocab: Vocab
    #: rank 0 without LoRA
    lora: LoraSettings
    #: whether the adapter is kept separate instead of merged
    keep_adapter: bool

    @property
    def described(self) -> Path:
        """The folder with the architecture and the tokenizer."""
        return self.folder / DESCRIBED

    @property
    def table(self) -> Path | None:
        """The n-gram table's path; None if the data had no n-gram table."""
        path = self.folder / TABLE
        return path if path.exists() else None

    @property
    def config(self) -> PretrainedConfig:
        """A new copy of the model's configuration."""
        config: PretrainedConfig = AutoConfig.from_pretrained(
            self.described, local_files_only=True, trust_remote_code=False
        )
        return config

    def weights(self, dtype: torch.dtype) -> CheckpointWeights:
        """Return the checkpoint's weights, including LoRA weights."""
        frozen = self.folder / FROZEN if self.checkpoint.frozen else None
        return CheckpointWeights(
            self.folder / CHECKPOINTS / self.checkpoint.name, dtype, frozen
        )

    def plain_weights(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, *, merged: bool
    ) -> PlainWeights:
        """Return the plain model's weights, computed from an adapted model's `weights`."""
        return PlainWeights(
            skeleton(self.config),
            self.lora,
            weights,
            adaptive=self.manifest["adaptive"],
            merged=merged,
            dtype=dtype,
        )

    def served_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the weights to write, with the adapter merged unless it is kept."""
        if not self.lora.rank:
            return self.weights(dtype)
        weights = self.weights(dtype if self.keep_adapter else torch.float32)
        return self.plain_weights(weights, dtype, merged=not self.keep_adapter)


def open_trained(folder: str, *, keep_adapter: bool = False) -> Trained:
    """Open the training folder that the setting `checkpoint` names.

    Raise UserError if it has no intact checkpoint, if its architecture, tokenizer or
    n-gram table differs from the training's, or if `infer` would refuse the architecture.
    """
    manifest = read_manifest(folder, "checkpoint", "checkpoint")
    checkpoint, broken = find_intact(list_checkpoints(Path(folder) / CHECKPOINTS))
    if checkpoint is None:
        raise UserError(
            f"checkpoint={folder} must contain an intact checkpoint, got none. "
            "Rerun the training command."
        )
    for path, reason in broken.items():
        print_line(f"export: {path} is broken ({reason}); using {checkpoint.name}")
    if checkpoint.frozen:
        check_frozen(Path(folder) / FROZEN)
    trained = Trained(
        Path(folder),
        manifest,
        checkpoint,
        vocab=Vocab.from_json(manifest["vocab"]),
        lora=trained_lora(manifest),
        keep_adapter=keep_adapter,
    )
    tokenizer = tokenizer_file(trained.described)
    files = {
        "architecture": trained.described / "config.json",
        "tokenizer": tokenizer,
    }
    for name, path in files.items():
        if fingerprint_file(path) != manifest[name]:
            raise UserError(
                f"{path} must be the {name} of the training, got a changed file. Restore it."
            )
    if reason := why_unsupported(trained.config):
        raise UserError(
            f"checkpoint={folder} must be of a model that can be decoded, "
            f"got {trained.config.model_type}, {reason}. "
            "Train another model."
        )
    find_table(trained.folder, vocabulary=trained.vocab.text_size, tokenizer=tokenizer)
    return trained
