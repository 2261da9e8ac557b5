"""A model directory: the library's model, the tokenizer, and what adaptive.json says.

All that decoding knows of training comes from here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from conf import UserError
from infer import parallel
from infer.attention import NAME, register
from infer.families import check_family, check_tree
from infer.gate import with_adapter


@dataclass(frozen=True)
class Adaptive:
    """The adaptive ids: one (identical tokens, any k) or several (diverse, k up to their number)."""

    ids: tuple[int, ...]
    L: int
    gated: bool = False  # the adapter of the directory acts on probes alone


class Text:
    """Prompts to ids as in training, and ids back to text."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"model: wanted a tokenizer at {path}, found none")
        self._tokenizer = Tokenizer.from_file(str(path))
        # A prompt that spells a special piece is text, as it was in training.
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """BOS and the prompt."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Text without control pieces."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def check_directory(folder: str | Path) -> Path:
    """The directory, if it can be a model. Raises UserError at once: the hub is never asked."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        found = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(f"model={folder}: wanted a Transformers model directory, found {found}")
    return path


def load_model(folder: str | Path, *, dtype: str, device: str | None = None) -> PreTrainedModel:
    """The library's model with tree attention and its adapter, if it has one, ready to decode.

    Under torchrun it is divided over the processes, each on its own GPU or all on CPUs. Raises UserError
    for a directory that is no model or lacks its adapter, a model that trees or so many processes do not
    suit, and an adapter that would have to be divided.
    """
    register()
    logging.disable_progress_bar()
    path, ranks = check_directory(folder), parallel.processes()
    gated = (path / "adaptive.json").is_file() and load_adaptive(path).gated
    adapted = gated or (path / "adapter").is_dir()
    if ranks > 1 and adapted:
        raise UserError(f"model={folder}: wanted a model without an adapter for {ranks} processes, found one")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        check_family(config)
        lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=NAME,
            local_files_only=True,
            distributed_config=parallel.plan(config, ranks) if ranks > 1 else None,
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model={folder}: wanted a causal model with weights, found {reason}") from error
    if adapted:
        lm = with_adapter(lm, path / "adapter", gated=gated)
    if ranks == 1:
        lm.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
    check_tree(lm.eval())
    return lm


def eos_ids(lm: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text; a model may have none, one or several."""
    found = lm.generation_config.eos_token_id if lm.generation_config else None
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def load_text(folder: str | Path) -> Text:
    """The directory's tokenizer."""
    return Text(check_directory(folder) / "tokenizer.json")


def load_adaptive(folder: str | Path) -> Adaptive:
    """The adaptive ids. Raises UserError where the model was trained without them."""
    path = check_directory(folder) / "adaptive.json"
    if not path.is_file():
        raise UserError(
            f"model={folder}: wanted a model fine-tuned with adaptive tokens, found no adaptive.json in it"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Adaptive(
            tuple(map(int, value["adaptive_ids"])), int(value["L"]), bool(value.get("gated", False))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: wanted adaptive_ids and L, found {error!r}") from error
