"""A finished training folder, as an export reads it; that it describes what was trained, checks.py asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from conf import UserError
from conf.characters import print_line
from conf.fingerprint import fingerprint
from conf.stage import read_manifest
from data_prep.ngrams import TABLE
from data_prep.vocab import Vocab
from train.checkpoint import Checkpoint, find_whole, list_checkpoints
from train.config import CHECKPOINTS, DESCRIBED, LoraSettings, ObjectiveConfig
from train.export.adapter import trained_lora
from train.export.checkpoint_weights import CheckpointWeights
from train.lora import PlainWeights
from train.pretrained import skeleton


@dataclass(frozen=True)
class Trained:
    """The folder, its manifest, and its newest whole checkpoint."""

    folder: Path
    manifest: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def described(self) -> Path:
        """The folder of the architecture and the tokenizer."""
        return self.folder / DESCRIBED

    @property
    def table(self) -> Path | None:
        """The n-gram table; None where the data had none."""
        path = self.folder / TABLE
        return path if path.exists() else None

    @property
    def vocab(self) -> Vocab:
        """The ids of the control pieces."""
        return Vocab.from_json(self.manifest["vocab"])

    @property
    def objective(self) -> ObjectiveConfig:
        """What was learned."""
        return ObjectiveConfig(**self.manifest["settings"]["objective"])

    @property
    def lora(self) -> LoraSettings:
        """How; rank 0 without LoRA."""
        return trained_lora(self.manifest)

    @property
    def validation(self) -> dict[str, float]:
        """The metrics of the checkpoint's own validation. Raises UserError where it had none."""
        step = self.checkpoint.step
        for row in self.manifest["validation"]:
            if row["step"] == step:
                return {name: value for name, value in row.items() if name != "step"}
        raise UserError(
            f"verify: wanted a checkpoint that was validated, found that of step {step} in {self.folder}, "
            "which was not; verify=false exports it unverified"
        )

    @property
    def config(self) -> PretrainedConfig:
        """The architecture, read anew."""
        return AutoConfig.from_pretrained(self.described, local_files_only=True, trust_remote_code=False)

    def weights(self, dtype: torch.dtype) -> CheckpointWeights:
        """Of the library's model, adapted where LoRA was trained."""
        return CheckpointWeights(self.folder / CHECKPOINTS / self.checkpoint.name, dtype)

    def measurable(self, override: str) -> Path:
        """The data of the checkpoint's own validation, to measure that again. Raises UserError where either is
        missing: before anything is written.
        """
        _ = self.validation
        return self.shards(override)

    def served_weights(self, dtype: torch.dtype, *, kept: bool) -> Mapping[str, Tensor]:
        """Of the plain model, which is served: with LoRA merged in float32, or the base model's, with the
        adapter `kept` beside them.
        """
        if not self.lora.rank:
            return self.weights(dtype)
        return PlainWeights(
            skeleton(self.config),
            self.lora,
            self.weights(dtype if kept else torch.float32),
            adaptive=self.manifest["adaptive"],
            merged=not kept,
            dtype=dtype,
        )

    def shards(self, override: str) -> Path:
        """The data that it was trained on: where they lay then, or where the setting data.path says.

        Raises UserError where they are not, or are others.
        """
        place = override or self.manifest.get("places", {}).get("data.path")
        if place is None or not (override or Path(place).is_dir()):
            found = f"nothing at {place}" if place else "no word of where they are"
            raise UserError(
                f"data.path: wanted the shards that {self.folder} was trained on, to verify the export with, "
                f"found {found}: give data.path=DIR, or verify=false"
            )
        read_manifest(place, "shards", "data.path")
        if fingerprint(place) != self.manifest["inputs"]["data.path"]:
            raise UserError(
                f"data.path={place}: wanted the shards that {self.folder} was trained on, found others"
            )
        return Path(place)


def open_trained(folder: str) -> Trained:
    """The training folder of the setting `checkpoint`.

    Raises UserError for one that is not finished or has no whole checkpoint.
    """
    manifest = read_manifest(folder, "checkpoint", "checkpoint")
    found, broken = find_whole(list_checkpoints(Path(folder) / CHECKPOINTS))
    if found is None:
        raise UserError(f"checkpoint={folder}: wanted a folder with checkpoints, found none")
    for path, why in broken.items():
        print_line(f"export: {path} is broken ({why}): {found.name} is taken")
    return Trained(Path(folder), manifest, found)
