"""A finished training folder, as an export reads it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conf import UserError
from conf.stage import fingerprint, fingerprint_file, read_manifest
from data_prep.vocab import Vocab, load_tokenizer
from train.config import LoraSettings, ObjectiveConfig
from train.engine.record import Checkpoint, find_whole, list_checkpoints
from train.export.adapter import trained_lora
from train.export.checkpoint_weights import CheckpointWeights
from train.model.families import skeleton
from train.model.lora import PlainWeights, adapt


@dataclass(frozen=True)
class Trained:
    """The folder, its manifest, and its newest whole checkpoint."""

    folder: Path
    manifest: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def described(self) -> Path:
        """The folder of the architecture and the tokenizer."""
        return self.folder / "model"

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
        return CheckpointWeights(self.folder / "checkpoints" / self.checkpoint.name, dtype)

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

    Raises UserError for one that is not finished, has no whole checkpoint, or describes another model than
    was trained.
    """
    manifest = read_manifest(folder, "checkpoint", "checkpoint")
    found, broken = find_whole(list_checkpoints(Path(folder) / "checkpoints"))
    if found is None:
        raise UserError(f"checkpoint={folder}: wanted a folder with checkpoints, found none")
    for path, why in broken.items():
        print(f"export: {path} is broken ({why}): {found.name} is taken")
    trained = Trained(Path(folder), manifest, found)
    _check_described(trained)
    return trained


def _check_described(trained: Trained) -> None:
    """Raises UserError unless architecture and tokenizer are those that were trained."""
    place, described, size = f"checkpoint={trained.folder}", trained.described, trained.vocab.size
    config = described / "config.json"
    if not config.is_file():
        raise UserError(f"{place}: wanted the model's config.json in {described}, found none")
    _check_class(config)
    try:
        rows = trained.config.vocab_size
    except (OSError, ValueError, AttributeError, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        raise UserError(f"{place}: wanted a model's config.json in {described}, found {told}") from error
    if rows < size:
        raise UserError(f"{place}: wanted a model of at least {size} embedding rows, found {rows}")
    # Folders of earlier versions do not say what either file was.
    if trained.manifest.get("architecture") not in (None, fingerprint_file(config)):
        raise UserError(f"{config}: wanted the architecture that was trained, found the file changed since")
    _check_tokenizer(trained)
    _check_weights(trained)


def _check_class(config: Path) -> None:
    """Raises UserError where the model is none of the library's own: its code is never run.

    `auto_map` beside a model_type that the library has is a hub's word for others, and the library's class is
    the one that was trained.
    """
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: wanted JSON, found {error}") from error
    if not isinstance(described, dict) or described.get("model_type") not in CONFIG_MAPPING:
        found = described.get("model_type") if isinstance(described, dict) else type(described).__name__
        own = f", and code of its own (auto_map={described['auto_map']})" if "auto_map" in described else ""
        raise UserError(f"{config}: wanted a model_type that Transformers has, found {found}{own}")


def _check_tokenizer(trained: Trained) -> None:
    """Raises UserError unless it is the one that was trained with."""
    file, vocab = trained.described / "tokenizer.json", trained.vocab
    tokenizer = load_tokenizer(trained.described)
    pieces = tokenizer.get_vocab_size(with_added_tokens=False)
    if pieces > vocab.size or trained.manifest.get("tokenizer") not in (None, fingerprint_file(file)):
        raise UserError(
            f"{file}: wanted the tokenizer that was trained with, of at most {vocab.size} pieces, found "
            f"another of {pieces}"
        )
    for name, id in (("BOS", vocab.bos), ("EOS", vocab.eos)):
        if tokenizer.id_to_token(id) is None:
            raise UserError(
                f"{file}: wanted a piece for the {name} {id} of the training, found none: it is another model's"
            )


def _check_weights(trained: Trained) -> None:
    """Raises UserError unless the architecture has the checkpoint's weights, no others, and in their shapes.

    A layer less would else be left out in silence.
    """
    lm = skeleton(trained.config)
    if trained.lora.rank:
        adapt(lm, trained.lora, adaptive=trained.manifest["adaptive"])
    wanted = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    found = trained.weights(torch.bfloat16).shapes  # the type that every checkpoint has
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{trained.described / 'config.json'}: wanted the architecture of the weights of "
                f"{trained.checkpoint.name}, found {name} of {_shape(wanted.get(name))} here and of "
                f"{_shape(found.get(name))} there"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no shape" if shape is None else " x ".join(map(str, shape))
