"""Check, load or randomly initialize a Transformers model; read the origin of a base model."""

import copy
import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging
from yaml import YAMLError

from conf.adapter import ADAPTIVE_FILE, CONFIG, FOLDER
from conf.architecture import why_unsupported
from conf.console import print_once
from conf.errors import UserError, as_user_error, in_one_line
from conf.runs.files import check_regular, read_json
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.attention import register
from train.config import ModelConfig
from train.distributed import gather

# The folder of a model in huggingface_hub's cache: owner, name and commit.
HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
LICENSE = ("license", "license_name", "license_link")  # fields of a model card


def model_config(
    config: ModelConfig, *, vocab: Vocab | None = None, needed: bool = True
) -> PretrainedConfig:
    """Return the configuration in the model directory, or `shape` for random weights.

    Random weights take the vocabulary of the data. If weights are not `needed`, as in a plan,
    `shape` also replaces a model.path that is not set. Raises UserError if model.path is not a
    model directory.
    """
    if config.random_init or (config.path is None and not needed):
        shape = dict(config.shape)
        if vocab is not None:
            shape["vocab_size"] = vocab.size
            shape["bos_token_id"] = vocab.bos
            shape["eos_token_id"] = vocab.eos
        return _config_of_shape(shape)
    if config.path is None:
        raise UserError(
            "model.path must be a Transformers directory with weights, got null. "
            "Set model.path, or model=tiny for random weights."
        )
    check_regular(Path(config.path), "model.path")
    with as_user_error(
        f"model.path={config.path} must have a model's config.json, got",
        ". Download a model by hf download NAME --local-dir DIR.",
    ):
        architecture: PretrainedConfig = AutoConfig.from_pretrained(
            config.path, local_files_only=True, trust_remote_code=False
        )
        return architecture


def _config_of_shape(shape: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration for `model.shape`; model_type is llama if it is not given."""
    fields = {"model_type": "llama", **shape}
    kind = fields.pop("model_type")
    with as_user_error(f"model.shape must be valid for {kind}, got", ". Correct it."):
        config = AutoConfig.for_model(kind, **fields)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(fields.keys() - known):
        raise UserError(
            f"model.shape must have fields of {kind}, got {unknown[0]}. "
            "Remove it, or correct its name."
        )
    return config


def with_rows(architecture: PretrainedConfig, rows: int) -> PretrainedConfig:
    """Return a copy of a configuration with at least this many embedding rows."""
    grown = copy.deepcopy(architecture)
    grown.vocab_size = max(grown.vocab_size, rows)
    return grown


def check_architecture(config: PretrainedConfig, *, seq_len: int | None) -> None:
    """Raise UserError unless the model can train on sequences of `seq_len` tokens and decode.

    If `seq_len` is None, any context is accepted. An unsupported architecture, which may have
    no maximum context, is refused first.
    """
    if reason := why_unsupported(config):
        raise UserError(
            "model must be a causal model with attention that can follow a tree, "
            f"got {config.model_type}, {reason}. Use another model."
        )
    if config.max_position_embeddings < 1:
        raise UserError(
            "model must have a context of at least 1 token, got max_position_embeddings="
            f"{config.max_position_embeddings}. Correct the configuration."
        )
    if seq_len is not None and seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.path: sequences must have at most {config.max_position_embeddings:,} "
            f"tokens, the context of {config.model_type}, got {seq_len:,}. "
            "Prepare the data with a smaller seq_len."
        )


def load_trainable(
    config: ModelConfig,
    architecture: PretrainedConfig,
    *,
    vocab: Vocab,
    dtype: torch.dtype,
    seed: int,
    grows: bool = True,
) -> PreTrainedModel:
    """Return the model with its weights, ready for training. Every rank must call this.

    `architecture` is the result of `model_config`. Adaptive ids get their first rows, unless
    `grows` is False: then all rows stay the base model's. Raises UserError for missing or
    damaged weights.
    """
    logging.disable_progress_bar()
    attention = register(config.attention)
    torch.manual_seed(seed)
    if config.random_init or config.path is None:
        lm = AutoModelForCausalLM.from_config(
            architecture, attn_implementation=attention, trust_remote_code=False
        )
        # Convert parameters only: rotary frequencies, which are buffers, need float32.
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)
    else:
        _check_kept_adapter(Path(config.path))
        lm, failure = _read_model(
            config.path, architecture, dtype=dtype, attention=attention
        )
        # Under ZeRO 3 only rank 0 compares sizes, so all ranks must get its error.
        for reason in filter(None, gather(failure)):
            raise UserError(
                f"model.path={config.path} must be a complete model, got {reason}. "
                "Copy or download the model again."
            )
    rows = lm.get_input_embeddings().num_embeddings
    if not set(range(rows, vocab.size)) <= set(vocab.adaptive):
        raise UserError(
            f"model.path={config.path} must have at least {vocab.size} embedding rows "
            f"like the data's vocabulary, got {rows}. "
            "Prepare the data with the tokenizer of this model."
        )
    if grows:
        spare = [] if config.random_init else spare_rows(config.path, vocab.adaptive)
        add_adaptive_rows(lm, vocab.size, spare=spare)
    if config.activation_checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    if _compiles(config.compile):
        # Compile layer by layer, so that all layers share one graph. Shapes are dynamic
        # because the number of branch columns changes with each step.
        for layer in lm.get_decoder().layers:
            layer.compile(dynamic=True)
    model: PreTrainedModel = lm.train()
    return model


def _compiles(setting: bool | None) -> bool:
    """Return whether to compile the layers, by model.compile; a function of one operation is tried.

    Raises UserError if the setting is true and the trial fails.
    """
    on_gpu = torch.cuda.is_available()
    if setting is False or (setting is None and on_gpu):
        return False
    try:
        torch.compile(torch.neg)(torch.ones(8, device="cuda" if on_gpu else "cpu"))
    except RuntimeError as error:  # of several classes; the causes are the machine's
        (reason,) = str(error).splitlines()[:1] or [type(error).__name__]
        if setting:
            raise UserError(
                f"model.compile must be false where torch.compile fails, got true: {reason:.200}. "
                "Install g++, or set model.compile=false."
            ) from error
        print_once(f"train: the layers are not compiled: {reason:.200}")
        return False
    return True


def is_gated(folder: Path) -> bool:
    """Return whether the adapter of a model directory is for drafts only, by its adaptive.json."""
    path = folder / ADAPTIVE_FILE
    return path.is_file() and bool(read_json(path).get("gated", False))


def _check_kept_adapter(folder: Path) -> None:
    """Raise UserError for a model directory that keeps its adapter apart (lora=kept).

    With a gated adapter the weights alone are the model.
    """
    if (folder / FOLDER / CONFIG).is_file() and not is_gated(folder):
        raise UserError(
            f"model.path={folder} must have all of the model in its weights, got an adapter "
            "in its folder adapter/. Export the model with lora=merged."
        )


def _read_model(
    path: str, architecture: PretrainedConfig, *, dtype: torch.dtype, attention: str
) -> tuple[Any, str]:
    """Return the Transformers model, and the reason why it cannot be trained, or ""."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hide the table of missing weights
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=architecture,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files cause many error types
        return None, in_one_line(error)
    finally:
        logging.set_verbosity(verbosity)
    lm, info = loaded
    # Transformers ties no head that differs from the embedding, but keeps the setting, by
    # which resizing and the export would tie it.
    if lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight:
        lm.config.tie_word_embeddings = False
    # Transformers also loads an adapter if there is an adapter_config.json.
    if getattr(lm, "peft_config", None):
        return lm, "adapter_config.json in the same folder as config.json"
    # Transformers initializes missing weights at random.
    if missing := sorted(info["missing_keys"]):
        return lm, f"no weights for {', '.join(missing[:3])}"
    return lm, ""


def spare_rows(folder: str | Path | None, adaptive: Collection[int]) -> list[int]:
    """Return the adaptive ids with embedding rows that have never been trained.

    These ids have no piece in the tokenizer of the model directory `folder`, and its
    adaptive.json does not list them.
    """
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        return []
    tokenizer = load_tokenizer(folder)
    path = Path(folder) / ADAPTIVE_FILE
    trained = read_json(path).get("adaptive_ids", []) if path.is_file() else []
    return [
        id for id in adaptive if tokenizer.id_to_token(id) is None and id not in trained
    ]


def add_adaptive_rows(lm: Any, size: int, *, spare: Sequence[int] = ()) -> None:
    """Initialize the rows of adaptive ids: new rows up to `size`, and the existing `spare` rows.

    In the embedding, each row is the mean of two rows from the longer half by norm; the id
    seeds the choice of the two. Untrained rows, and the mean of all rows, point in one
    direction, which is unlike the inputs that the model was trained on: with them the
    masked loss of Qwen2.5-Coder-0.5B began at 20 to 21 nats, with two-row means at 8 to 11
    (ln V is 11.9). In an untied head, a new row is the mean of all rows (Hewitt 2021,
    "Initializing New Word Embeddings"). In both cases the logit of the id is a mean of
    other logits, so it is never the largest. Transformers' mean_resizing is not used: it
    computes a covariance, which takes minutes at the width of a 34B model.
    """
    rows = lm.get_input_embeddings().num_embeddings
    first = [*(id for id in spare if id < rows), *range(rows, size)]
    if not first:
        return
    # Imported late: an export imports this module and does not need DeepSpeed.
    from train.engine import gathered

    if rows < size:
        lm.resize_token_embeddings(size, mean_resizing=False)
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    with gathered(head):
        weight: Tensor = head.weight.data
        weight[rows:] = weight[:rows].float().mean(0).to(weight.dtype)
        if head.bias is not None:
            bias: Tensor = head.bias.data
            bias[rows:] = bias[:rows].float().mean().to(bias.dtype)
    with gathered(embeddings):
        weight = embeddings.weight.data
        for id, pair in typical_pairs(weight[:rows], first).items():
            weight[id] = weight[pair].float().mean(0).to(weight.dtype)


def typical_pairs(weight: Tensor, ids: Sequence[int]) -> dict[int, list[int]]:
    """Return two row indices for each id, drawn from the longer half of (n, d) rows by norm.

    The id seeds the draw.
    """
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
    """Raise UserError if the model has another tokenizer than the shards."""
    if config.path is None or config.random_init:
        return
    folder = Path(config.path)
    if not (folder / "tokenizer.json").is_file():
        return
    if _vocabulary(folder) != _vocabulary(Path(data_path) / TOKENIZER):
        raise UserError(
            f"data.path={data_path} must have the tokenizer of {folder}, got another "
            f"tokenizer. Prepare the data with tokenizer={folder}."
        )


def _vocabulary(folder: Path) -> Any:
    """Return all that maps text to ids, for comparison; flags of special tokens do not count."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model, load_tokenizer(folder).get_vocab(with_added_tokens=True)


def base_model(folder: str | None) -> dict[str, Any]:
    """Return the name, license, hub repository and commit of a base model, as far as known.

    In the hub's cache, the path of the folder contains repository and commit. In any other
    folder, the model card gives the name: config.json of a fine-tuned model often names its
    own base instead.
    """
    if folder is None:
        return {}
    path = Path(folder).resolve()
    if match := HUB_CACHE.search(path.as_posix()):
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
    """Return these fields of the model card in a folder; {} if it has no valid card."""
    try:
        card = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, YAMLError):
        return {}
    return {name: card[name] for name in names if isinstance(card.get(name), str)}
