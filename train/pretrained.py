"""Transformers' models: checked, loaded or with random weights, and their origin."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging
from yaml import YAMLError

from conf.architecture import why_unsupported
from conf.errors import UserError, in_one_line
from conf.runs.files import check_regular, read_json
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.attention import register
from train.config import ModelConfig
from train.distributed import gather

ADAPTIVE = "adaptive.json"  # in the directory of a model with adaptive tokens
# A model's folder in the cache of the hub's client.
CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
LICENSE = ("license", "license_name", "license_link")


def model_config(
    config: ModelConfig, *, vocab: Vocab | None = None
) -> PretrainedConfig:
    """Return the architecture of the directory, or of `shape` for random weights.

    Random weights use the data's vocabulary. Without a vocabulary (a plan) the shape
    serves if there is no directory. Raises UserError for a path without a model.
    """
    if config.random_init or (config.path is None and vocab is None):
        shape = dict(config.shape)
        if vocab is not None:
            shape["vocab_size"] = vocab.size
            shape["bos_token_id"] = vocab.bos
            shape["eos_token_id"] = vocab.eos
        return _config_of_shape(shape)
    if config.path is None:
        raise UserError(
            "model.path must be a Transformers directory with weights, got null."
        )
    check_regular(Path(config.path), "model.path")
    try:
        architecture: PretrainedConfig = AutoConfig.from_pretrained(
            config.path, local_files_only=True, trust_remote_code=False
        )
        return architecture
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.path={config.path} must have a model's config.json, "
            f"got {in_one_line(error)}."
        ) from error


def _config_of_shape(shape: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of `model.shape`, Llama's unless it has a model_type."""
    fields = {"model_type": "llama", **shape}
    kind = fields.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **fields)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.shape must be valid for {kind}, got {in_one_line(error)}."
        ) from error
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(fields.keys() - known):
        raise UserError(f"model.shape must have fields of {kind}, got {unknown[0]}.")
    return config


def check_architecture(config: PretrainedConfig, *, seq_len: int) -> None:
    """Raise UserError unless the model trains on `seq_len` tokens, and decodes."""
    if reason := why_unsupported(config):
        raise UserError(
            "model must be a causal model whose attention follows a tree, "
            f"got {config.model_type}, {reason}."
        )
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.path: sequences must have at most {config.max_position_embeddings:,} "
            f"tokens, the context of {config.model_type}, got {seq_len:,}. "
            "Prepare the data with a smaller seq_len."
        )


def load_trainable(
    config: ModelConfig,
    *,
    vocab: Vocab,
    dtype: torch.dtype,
    seed: int,
    grows: bool = True,
) -> PreTrainedModel:
    """Return the model with its weights, for training. Called by every rank.

    Adaptive ids get their first rows, unless `grows` is False: then the rows stay the
    base model's. Raises UserError as `model_config` does, and for a directory that lacks weights.
    """
    architecture = model_config(config, vocab=vocab)
    logging.disable_progress_bar()
    attention = register(config.attention)
    torch.manual_seed(seed)
    if config.random_init or config.path is None:
        lm = AutoModelForCausalLM.from_config(
            architecture, attn_implementation=attention, trust_remote_code=False
        )
        # Not the buffers: rotary frequencies need float32.
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)
    else:
        lm, failure = _read_model(config.path, dtype=dtype, attention=attention)
        # Under ZeRO 3 rank 0 alone compares sizes: the others must hear of an error.
        for reason in filter(None, gather(failure)):
            raise UserError(
                f"model.path={config.path} must be a complete model, got {reason}."
            )
    rows = lm.get_input_embeddings().num_embeddings
    if not set(range(rows, vocab.size)) <= set(vocab.adaptive):
        raise UserError(
            f"model.path={config.path} must have at least {vocab.size} embedding rows "
            f"like the data's vocabulary, got {rows}."
        )
    if grows:
        spare = [] if config.random_init else spare_rows(config.path, vocab.adaptive)
        add_adaptive_rows(lm, vocab.size, spare=spare)
    if config.activation_checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        # All layers share one graph. The number of branches changes with the step.
        for layer in lm.get_decoder().layers:
            layer.compile(dynamic=True)
    model: PreTrainedModel = lm.train()
    return model


def _read_model(path: str, *, dtype: torch.dtype, attention: str) -> tuple[Any, str]:
    """Return the library's model, and why it cannot be trained or ""."""
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
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many kinds, if the files are damaged
        return None, in_one_line(error)
    finally:
        logging.set_verbosity(verbosity)
    lm, info = loaded
    # The library adds the adapter that adapter_config.json describes.
    if getattr(lm, "peft_config", None):
        return lm, "adapter_config.json beside config.json"
    # The library draws missing weights at random.
    if missing := sorted(info["missing_keys"]):
        return lm, f"no weights for {', '.join(missing[:3])}"
    return lm, ""


def spare_rows(folder: str | Path | None, adaptive: Collection[int]) -> list[int]:
    """Return the adaptive ids whose rows no training of the base model has used.

    They have no piece in the folder's tokenizer, and its adaptive.json does not have them.
    """
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        return []
    tokenizer = load_tokenizer(folder)
    path = Path(folder) / ADAPTIVE
    trained = read_json(path).get("adaptive_ids", []) if path.is_file() else []
    return [
        id for id in adaptive if tokenizer.id_to_token(id) is None and id not in trained
    ]


def add_adaptive_rows(lm: Any, size: int, *, spare: Sequence[int] = ()) -> None:
    """Give adaptive ids their first rows: the next ones up to `size`, and `spare` ones.

    In the embedding each is the mean of two rows that are drawn by its id among the longer
    half. Rows that no text has trained, and the mean of all rows, point in one direction,
    which is out of the model's range: on Qwen2.5-Coder-0.5B the masked loss began at 20 to
    21 nats with them, with these at 8 to 11 (ln V is 11.9). An added row of a head of its
    own is the mean of all (Hewitt 2021, "Initializing New Word Embeddings"). A logit of
    either row is a mean of other logits, so it never is the largest. The library's
    mean_resizing would compute a covariance, which takes minutes at the width of 34B.
    """
    rows = lm.get_input_embeddings().num_embeddings
    first = [*(id for id in spare if id < rows), *range(rows, size)]
    if not first:
        return
    # Imported late: an export needs this module, and no DeepSpeed.
    from train.engine import gathered

    if rows < size:
        lm.resize_token_embeddings(size, mean_resizing=False)
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    with gathered(head):
        weight: Tensor = head.weight.data
        weight[rows:] = weight[:rows].float().mean(0).to(weight.dtype)
    with gathered(embeddings):
        weight = embeddings.weight.data
        for id, pair in typical_pairs(weight[:rows], first).items():
            weight[id] = weight[pair].float().mean(0).to(weight.dtype)


def typical_pairs(weight: Tensor, ids: Sequence[int]) -> dict[int, list[int]]:
    """Return two rows for each id, drawn by the id from the longer half of (n, d) rows."""
    lengths = weight.float().norm(dim=1).cpu()
    lengths[[id for id in ids if id < len(lengths)]] = -1
    longer = (lengths >= lengths.median()).nonzero().flatten()
    pairs = {}
    for id in ids:
        generator = torch.Generator().manual_seed(id)
        pairs[id] = longer[
            torch.randperm(len(longer), generator=generator)[:2]
        ].tolist()
    return pairs


def check_tokenizer(config: ModelConfig, data_path: str) -> None:
    """Raise UserError if the model's tokenizer is not the one that made the shards."""
    if config.path is None or config.random_init:
        return
    folder = Path(config.path)
    if not (folder / "tokenizer.json").is_file():
        return
    if _vocabulary(folder) != _vocabulary(Path(data_path) / TOKENIZER):
        raise UserError(
            f"data.path={data_path} must have the tokenizer of {folder}, got another one."
        )


def _vocabulary(folder: Path) -> Any:
    """Return the map from text to ids, without marks of special tokens."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model, load_tokenizer(folder).get_vocab(with_added_tokens=True)


def base_model(folder: str | None) -> dict[str, Any]:
    """Return name, license, hub repository and commit of a base model, as far as known.

    The hub's cache has the last two in a folder's path. Elsewhere the folder's model
    card names the model: config.json often has the name of a fine-tuned model's own
    base.
    """
    if folder is None:
        return {}
    path = Path(folder).resolve()
    if match := CACHED.search(path.as_posix()):
        owner, name, commit = match.groups()
        return {
            "name": name,
            "hub": f"{owner}/{name}",
            "commit": commit,
            **_card(path, LICENSE),
        }
    card = _card(path, ("model_name", *LICENSE))
    return {name.removeprefix("model_"): value for name, value in card.items()}


def _card(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the front matter of a folder's model card; nothing without a valid one."""
    try:
        card = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, YAMLError):
        return {}
    return {name: card[name] for name in names if isinstance(card.get(name), str)}
