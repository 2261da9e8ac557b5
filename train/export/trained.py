"""A finished training folder as an export reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conf import UserError
from conf.console import print_line
from conf.errors import Refusing
from conf.files import read_json
from conf.fingerprint import fingerprint, fingerprint_file
from conf.stage import read_manifest
from data_prep.ngrams import TABLE, find_table
from data_prep.vocab import Vocab, tokenizer_file
from train.checkpoint import Checkpoint, find_whole, list_checkpoints
from train.config import CHECKPOINTS, DESCRIBED, LoraSettings, ObjectiveConfig
from train.export import trained_lora
from train.export.weights import CheckpointWeights
from train.lora import PlainWeights, adapt
from train.pretrained import skeleton


@dataclass(frozen=True)
class Trained:
    """A training folder, its manifest, and its newest whole checkpoint."""

    folder: Path
    manifest: dict[str, Any]
    checkpoint: Checkpoint
    vocab: Vocab
    objective: ObjectiveConfig
    lora: LoraSettings  # rank 0 without LoRA
    keep_adapter: bool  # beside the weights, not merged into them

    @property
    def described(self) -> Path:
        """The folder of the architecture and the tokenizer."""
        return self.folder / DESCRIBED

    @property
    def table(self) -> Path | None:
        """The n-gram table; None if the data had none."""
        path = self.folder / TABLE
        return path if path.exists() else None

    @property
    def config(self) -> PretrainedConfig:
        """The architecture, read anew."""
        return AutoConfig.from_pretrained(
            self.described, local_files_only=True, trust_remote_code=False
        )

    @property
    def validation(self) -> dict[str, float]:
        """The metrics of the checkpoint's own validation. Raise UserError if there was none."""
        return {
            name: value
            for name, value in self._validation.items()
            if name not in ("step", "sequences")
        }

    @property
    def validated_sequences(self) -> int:
        """The held-out sequences of that validation."""
        return int(self._validation["sequences"])

    @property
    def _validation(self) -> dict[str, float]:
        step = self.checkpoint.step
        for row in self.manifest["validation"]:
            if row["step"] == step:
                return row
        raise UserError(
            f"verify must have a validated checkpoint, got none at step {step} in {self.folder}. "
            "Use verify=false to export it unverified."
        )

    def weights(self, dtype: torch.dtype) -> CheckpointWeights:
        """Return the trained weights, those of LoRA among them."""
        return CheckpointWeights(
            self.folder / CHECKPOINTS / self.checkpoint.name, dtype
        )

    def served_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the plain model's weights: the base model's, with the adapter merged unless it is kept."""
        if not self.lora.rank:
            return self.weights(dtype)
        return PlainWeights(
            skeleton(self.config),
            self.lora,
            self.weights(dtype if self.keep_adapter else torch.float32),
            adaptive=self.manifest["adaptive"],
            merged=not self.keep_adapter,
            dtype=dtype,
        )

    def shards(self, override: str) -> Path:
        """Return the training data: where they were, or in the folder `override` if given.

        Raise UserError if they are missing or have changed.
        """
        place = override or self.manifest.get("places", {}).get(
            "data.path"
        )  # absent from earlier versions
        if not place or not (override or Path(place).is_dir()):
            raise UserError(
                f"data.path must be the shards that {self.folder} was trained on, got nothing at "
                f"{place or 'an unknown place'}. Give data.path=DIR, or verify=false."
            )
        read_manifest(place, "shards", "data.path")
        if fingerprint(place) != self.manifest["inputs"]["data.path"]:
            raise UserError(
                f"data.path={place} must be the shards that {self.folder} was trained on, got other shards."
            )
        return Path(place)


def open_trained(folder: str, *, keep_adapter: bool = False) -> Trained:
    """Open the training folder of the setting `checkpoint`.

    Raise UserError unless it is finished, with a whole checkpoint.
    """
    manifest = read_manifest(folder, "checkpoint", "checkpoint")
    checkpoint, broken = find_whole(list_checkpoints(Path(folder) / CHECKPOINTS))
    if checkpoint is None:
        raise UserError(f"checkpoint={folder} must contain checkpoints, got none.")
    for path, reason in broken.items():
        print_line(f"export: {path} is broken ({reason}); using {checkpoint.name}")
    return Trained(
        Path(folder),
        manifest,
        checkpoint,
        vocab=Vocab.from_json(manifest["vocab"]),
        objective=ObjectiveConfig(**manifest["settings"]["objective"]),
        lora=trained_lora(manifest),
        keep_adapter=keep_adapter,
    )


def check_trained(trained: Trained) -> None:
    """Raise UserError unless architecture, tokenizer and n-gram table are those of the training."""
    described = trained.described
    tokenizer = tokenizer_file(trained.described)
    for path in (described, *sorted(described.glob("*")), trained.folder / TABLE):
        if (
            path.is_symlink()
        ):  # may lead to any file of this machine, which an export would publish
            raise UserError(
                f"{path} must be a file, got a link to {path.readlink()}. Copy the file here."
            )
    file = described / "config.json"
    config = read_json(file, "a model's config.json")
    kind = config.get("model_type")
    if (
        not isinstance(kind, str) or kind not in CONFIG_MAPPING
    ):  # code beside the model is never run
        code = f" with auto_map={config['auto_map']}" if "auto_map" in config else ""
        raise UserError(
            f"{file} must have a model_type of Transformers, got {kind}{code}."
        )
    for path, name in ((file, "architecture"), (tokenizer, "tokenizer")):
        if trained.manifest.get(name) not in (
            None,
            fingerprint_file(path),
        ):  # None: an earlier version
            raise UserError(
                f"{path} must be the {name} of the training, got a changed file. Restore it."
            )
    find_table(trained.folder, vocabulary=trained.vocab.text_size, tokenizer=tokenizer)
    _check_shapes(trained, file)


def _check_shapes(trained: Trained, file: Path) -> None:
    """Raise UserError unless the architecture has exactly the checkpoint's weights, in their shapes."""
    with Refusing(f"{file} must be a model's config.json, got"):
        lm = skeleton(trained.config)
    if trained.lora.rank:
        adapt(lm, trained.lora, adaptive=trained.manifest["adaptive"])
    expected = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    stored = trained.weights(torch.bfloat16).shapes  # a type that every checkpoint has
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"{file} must fit the weights of {trained.checkpoint.name}, got {name} of shape "
                f"{expected.get(name)} here and {stored.get(name)} there."
            )
