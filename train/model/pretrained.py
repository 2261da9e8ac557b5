"""The model to train: Transformers' own, loaded or with random weights.

Knows the library's models; knows no engine, no data and no objective.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf import UserError
from conf.errors import in_one_line
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.config import ModelConfig
from train.objective.attention import register

Whole = Callable[..., contextlib.AbstractContextManager[Any]]  # puts modules' divided weights together


def model_config(config: ModelConfig, *, vocab: Vocab | None = None) -> PretrainedConfig:
    """The architecture: of the directory, or of `shape`; random weights take the data's vocabulary.

    Without a vocabulary (a plan) the shape serves where there is no directory.
    Raises UserError for a path that does not exist: at once, without asking the hub.
    """
    if config.random_init or (config.path is None and vocab is None):
        own = {}
        if vocab is not None:
            own = {"vocab_size": vocab.size, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
        return _of_shape({**config.shape, **own})
    if config.path is None:
        raise UserError("setting 'model.path' is required: a Transformers directory with weights")
    if not (Path(config.path) / "config.json").is_file():
        raise UserError(
            f"model.path={config.path}: wanted a Transformers directory, found no config.json there"
        )
    try:
        return AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.path={config.path}: wanted a model's config.json, found {_line(error)}"
        ) from error


def _of_shape(shape: dict[str, Any]) -> PretrainedConfig:
    """A configuration from `model.shape`: the fields of its model_type's class, Llama's by default."""
    kind = shape.get("model_type", "llama")
    if kind not in CONFIG_MAPPING:
        raise UserError(f"model.shape.model_type: wanted an architecture of Transformers, found {kind!r}")
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    if unknown := sorted(fields.keys() - known):
        raise UserError(f"model.shape: wanted fields of {CONFIG_MAPPING[kind].__name__}, found {unknown[0]}")
    try:
        return AutoConfig.for_model(kind, **fields)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.shape: wanted the fields of a {CONFIG_MAPPING[kind].__name__}, found {_line(error)}"
        ) from error


def load_model(
    config: ModelConfig,
    *,
    vocab: Vocab,
    dtype: torch.dtype,
    seed: int,
    whole: Whole = contextlib.nullcontext,
    every_rank: Callable[[str], list[str]] = lambda failure: [failure],
) -> PreTrainedModel:
    """The model with its weights, for training; `whole` and `every_rank`, which gathers a value of each rank,
    are needed where ZeRO 3 divides them as they come.

    Raises UserError as `model_config` does, and for a directory that lacks weights of the model.
    """
    found = model_config(config, vocab=vocab)
    logging.disable_progress_bar()
    attention = register(config.attention)
    torch.manual_seed(seed)
    if config.random_init or config.path is None:
        lm = AutoModelForCausalLM.from_config(found, attn_implementation=attention)
        for parameter in lm.parameters():  # not the buffers, whose rotary frequencies need float32
            parameter.data = parameter.data.to(dtype)
    else:
        lm, failure = _read_model(config.path, dtype=dtype, attention=attention)
        # Under ZeRO 3 rank 0 alone compares sizes: the others would wait for it in the next collective.
        for sentence in filter(None, every_rank(failure)):
            raise UserError(f"model.path={config.path} {sentence}. Use a complete copy of the model.")
    _grow(lm, config, vocab, whole)
    if config.activation_checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        # Every layer by itself: they share one compiled graph. Branches differ in number from step to step.
        for layer in lm.get_decoder().layers:
            layer.compile(dynamic=True)
    return lm.train()


def _read_model(path: str, *, dtype: torch.dtype, attention: str) -> tuple[Any, str]:
    """Return the library's model, and the end of a sentence that says what is wrong with it, or ""."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights is a table
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with both sizes
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the library meets first in files that are none of its own
        return None, f"must be a causal model with weights, got {in_one_line(error)}"
    finally:
        logging.set_verbosity(verbosity)
    lm, info = loaded
    if getattr(lm, "peft_config", None):  # the library adds what adapter_config.json describes
        return lm, "must be a model without an adapter, got adapter_config.json beside config.json"
    # The library would draw such weights at random.
    for name, stored, expected in sorted(info["mismatched_keys"]):
        return lm, f"must have {name} of size {tuple(expected)}, as config.json says, got {tuple(stored)}"
    if missing := sorted(info["missing_keys"]):
        return lm, f"must have every weight of the model, got none for {', '.join(missing[:3])}"
    return lm, ""


def _grow(lm: Any, config: ModelConfig, vocab: Vocab, whole: Whole) -> None:
    """Add the embedding rows that the data's vocabulary has beyond the model's, if adaptive ids alone are.

    Each is the mean of the others: then the head gives none of them an outstanding logit (Hewitt 2021,
    "Initializing New Word Embeddings"). The library's mean_resizing adds noise of 1e-9 to it, by way of
    a covariance that takes minutes at the width of 34B.
    """
    rows = lm.get_input_embeddings().num_embeddings
    if not set(range(rows, vocab.size)) <= set(vocab.adaptive):
        raise UserError(
            f"model.path={config.path}: wanted at least {vocab.size} embedding rows, as the data's "
            f"vocabulary has, found {rows}"
        )
    if rows < vocab.size:
        lm.resize_token_embeddings(vocab.size, mean_resizing=False)
        for embeddings in (lm.get_input_embeddings(), lm.get_output_embeddings()):
            with whole(embeddings):
                weight: Tensor = embeddings.weight.data
                weight[rows:] = weight[:rows].float().mean(0).to(weight.dtype)


def check_tokenizer(config: ModelConfig, data_path: str) -> None:
    """Raises UserError when the model's tokenizer is not the one that made the shards."""
    if config.path is None or config.random_init:
        return
    theirs, ours = Path(config.path), Path(data_path) / TOKENIZER
    if not (theirs / "tokenizer.json").is_file():
        return
    if _vocabulary(theirs) != _vocabulary(ours):
        raise UserError(
            f"data.path={data_path}: wanted shards made with the tokenizer of {config.path}, "
            "found shards of another tokenizer"
        )


def _line(error: Exception) -> str:
    """A library's message of many lines in one."""
    return " ".join(str(error).split())


def _vocabulary(folder: Path) -> Any:
    """What makes ids of text. Which of them are marked special is no part of it: an export marks the adaptive
    ones, and what it wrote can be trained on.
    """
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model, load_tokenizer(folder).get_vocab(with_added_tokens=True)
