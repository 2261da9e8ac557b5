"""Read what a run needs to know about its inputs, once, before any weights are loaded."""

from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.runs.stage import model_directories, read_manifest
from data_prep.vocab import Vocab
from train.config import TrainConfig


@dataclass(frozen=True)
class RunInputs:
    """The manifests of a run's shards, their vocabulary, and the folders of all inputs."""

    data: dict[str, Any]  # manifest of data.path
    own: dict[str, Any] | None  # manifest of data.own
    vocab: Vocab
    folders: dict[str, str]  # by setting; their fingerprints are in the provenance

    @property
    def seq_len(self) -> int:
        """The number of tokens of a sequence."""
        return int(self.data["seq_len"])


def read_inputs(config: TrainConfig) -> RunInputs:
    """Read the manifests of the settings' folders. This does not import PyTorch.

    Raises UserError if data.path is not set, if a folder is not a finished folder of shards,
    if objective.L is not shorter than a sequence, or if model.adapter or
    model.mean_with has no adapter.
    """
    if not config.data.path:
        raise UserError("setting 'data.path' is required: give it as data.path=VALUE")
    data = read_manifest(config.data.path, "shards", "data.path")
    L, seq_len = config.objective.L, data["seq_len"]
    if config.objective.name != "causal" and seq_len <= L:
        raise UserError(
            f"objective.L must be below the {seq_len} tokens of a sequence of {config.data.path}, "
            f"got {L}. Lower objective.L, or prepare data with a larger seq_len."
        )
    if not data["train"]["sequences"]:
        raise UserError(
            f"data.path={config.data.path} must have training sequences, got none. Prepare it with a "
            "smaller held_out, or more data."
        )
    folders = {"data.path": config.data.path}
    folders |= model_directories({"model.path": config.model.path})
    own = None
    if config.data.own:
        own = read_manifest(config.data.own, "shards", "data.own")
        folders["data.own"] = config.data.own
    for number, adapter in enumerate(config.model.adapter_folders):
        name = f"model.mean_with[{number - 1}]" if number else "model.adapter"
        folders[name] = str(adapter)
    return RunInputs(data, own, Vocab.from_json(data["vocab"]), folders)
