"""Transformers' models: which ones train here, loaded or with random weights, and where they come from.

Causal models with rotary positions train; others are refused with their architecture's name.
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging
from yaml import YAMLError

from conf import UserError
from conf.errors import in_one_line
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.attention import register
from train.config import ModelConfig
from train.distributed import gather

CHECKED_ROWS = 8  # of the head that stands in for the model's own
CACHED = re.compile(
    r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$"
)  # as the hub's client caches
LICENSE = ("license", "license_name", "license_link")


def model_config(
    config: ModelConfig, *, vocab: Vocab | None = None
) -> PretrainedConfig:
    """Return the architecture, of the directory or of `shape`; random weights use the data's vocabulary.

    Without a vocabulary (a plan) the shape serves if there is no directory. Raises UserError for a path that
    does not exist, without asking the hub.
    """
    if config.random_init or (config.path is None and vocab is None):
        ids = {}
        if vocab is not None:
            ids = {
                "vocab_size": vocab.size,
                "bos_token_id": vocab.bos,
                "eos_token_id": vocab.eos,
            }
        return _config_of_shape({**config.shape, **ids})
    if config.path is None:
        raise UserError(
            "setting 'model.path' is required: a Transformers directory with weights"
        )
    if not (Path(config.path) / "config.json").is_file():
        raise UserError(
            f"model.path={config.path} must be a Transformers directory, got no config.json there"
        )
    try:
        return AutoConfig.from_pretrained(
            config.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.path={config.path} must have a model's config.json, got {in_one_line(error)}"
        ) from error


def _config_of_shape(shape: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of `model.shape`: fields of its model_type's class, Llama's by default."""
    kind = shape.get("model_type", "llama")
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"model.shape.model_type must be an architecture of Transformers, got {kind!r}"
        )
    name = CONFIG_MAPPING[kind].__name__
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    if unknown := sorted(fields.keys() - known):
        raise UserError(f"model.shape must have fields of {name}, got {unknown[0]}")
    try:
        return AutoConfig.for_model(kind, **fields)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model.shape must be valid for {name}, got {in_one_line(error)}"
        ) from error


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the library's model of this architecture on the meta device: shapes without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_architecture(config: PretrainedConfig, *, seq_len: int) -> None:
    """Raise UserError, naming the architecture, unless its causal loss over `seq_len` tokens is ours.

    Ours computes logits from the head's weight alone, passes positions and masks to a rotary model, and packs
    documents without resetting anything between them.
    """
    if reason := _why_unsupported(config, seq_len) or _why_head_unsupported(config):
        raise UserError(
            f"model must be a causal model with rotary positions, got {config.model_type}, {reason}"
        )
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.path: sequences must have at most {config.max_position_embeddings:,} tokens, the context of "
            f"{config.model_type}, got {seq_len:,}. Prepare the data with a smaller seq_len"
        )


def _why_unsupported(config: PretrainedConfig, seq_len: int) -> str:
    """Return what the configuration says against training it, as the end of a sentence, or ""."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "which is no decoder-only language model"
    if not getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return "whose configuration has no rotary positions"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    kinds = layers - {"full_attention", "sliding_attention"}
    if kinds or model._is_stateful:
        return f"which has layers other than attention{': ' + ', '.join(sorted(kinds)) if kinds else ''}"
    if not (model._supports_attention_backend and model._supports_sdpa):
        return "whose attention is more than the library's kernels compute"
    window = getattr(config, "sliding_window", None)
    if window and window < seq_len and "sliding_attention" in layers:
        return f"whose window sliding_window={window} is narrower than the sequences of {seq_len:,} tokens"
    return ""


def _why_head_unsupported(config: PretrainedConfig) -> str:
    """Try whether the logits are only the head's weight times the hidden states, not scaled, capped or shifted.

    The library's own forward gets a small head and chosen hidden states.
    """
    try:
        lm = skeleton(config)
        head: nn.Linear = lm.get_output_embeddings()
        small = nn.Linear(head.in_features, CHECKED_ROWS, bias=head.bias is not None)
        hidden = torch.randn(1, 2, head.in_features)
        lm.set_output_embeddings(small)
        lm.get_decoder().forward = lambda *args, **kwargs: MoeModelOutputWithPast(
            last_hidden_state=hidden
        )
        with torch.no_grad():
            logits = lm(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
        same = torch.allclose(logits, hidden @ small.weight.T, rtol=1e-4, atol=1e-5)
    except Exception as error:  # of the architecture's own code
        return f"whose head could not be tried ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        ""
        if same
        else "whose logits are not its head's weight times the last hidden states"
    )


def load_trainable(
    config: ModelConfig, *, vocab: Vocab, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Return the model with its weights, for training. Called by every rank.

    Raises UserError as `model_config` does, and for a directory that lacks weights of the model.
    """
    architecture = model_config(config, vocab=vocab)
    logging.disable_progress_bar()
    attention = register(config.attention)
    torch.manual_seed(seed)
    if config.random_init or config.path is None:
        lm = AutoModelForCausalLM.from_config(
            architecture, attn_implementation=attention
        )
        for (
            parameter
        ) in lm.parameters():  # not the buffers, whose rotary frequencies need float32
            parameter.data = parameter.data.to(dtype)
    else:
        lm, failure = _read_model(config.path, dtype=dtype, attention=attention)
        # Under ZeRO 3 rank 0 alone compares sizes: the others would wait for it in the next collective.
        for sentence in filter(None, gather(failure)):
            raise UserError(
                f"model.path={config.path} {sentence}. Use a complete copy of the model."
            )
    _add_adaptive_rows(lm, config, vocab)
    if config.activation_checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        # Layer by layer: all share one compiled graph. The number of branches differs from step to step.
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
    except Exception as error:  # of many kinds, if the files are damaged
        return None, f"must be a causal model with weights, got {in_one_line(error)}"
    finally:
        logging.set_verbosity(verbosity)
    lm, info = loaded
    if getattr(
        lm, "peft_config", None
    ):  # the library adds what adapter_config.json describes
        return (
            lm,
            "must be a model without an adapter, got adapter_config.json beside config.json",
        )
    # The library would draw such weights at random.
    for name, stored, expected in sorted(info["mismatched_keys"]):
        return (
            lm,
            f"must have {name} of size {tuple(expected)}, as config.json says, got {tuple(stored)}",
        )
    if missing := sorted(info["missing_keys"]):
        return (
            lm,
            f"must have every weight of the model, got none for {', '.join(missing[:3])}",
        )
    return lm, ""


def _add_adaptive_rows(lm: Any, config: ModelConfig, vocab: Vocab) -> None:
    """Add the embedding rows that the data's vocabulary has beyond the model's, if they are of adaptive ids.

    Each is the mean of the others: then the head gives none of them an outstanding logit (Hewitt 2021,
    "Initializing New Word Embeddings"). The library's mean_resizing adds noise of 1e-9 to it, by way of a
    covariance that takes minutes at the width of 34B.
    """
    rows = lm.get_input_embeddings().num_embeddings
    if not set(range(rows, vocab.size)) <= set(vocab.adaptive):
        raise UserError(
            f"model.path={config.path} must have at least {vocab.size} embedding rows, as the data's "
            f"vocabulary has, got {rows}"
        )
    if rows < vocab.size:
        from train.engine import gathered  # and with it DeepSpeed

        lm.resize_token_embeddings(vocab.size, mean_resizing=False)
        for embeddings in (lm.get_input_embeddings(), lm.get_output_embeddings()):
            with gathered(embeddings):
                weight: Tensor = embeddings.weight.data
                weight[rows:] = weight[:rows].float().mean(0).to(weight.dtype)


def check_tokenizer(config: ModelConfig, data_path: str) -> None:
    """Raise UserError if the model's tokenizer is not the one that made the shards."""
    if (
        config.path is None
        or config.random_init
        or not (Path(config.path) / "tokenizer.json").is_file()
    ):
        return
    if _vocabulary(Path(config.path)) != _vocabulary(Path(data_path) / TOKENIZER):
        raise UserError(
            f"data.path={data_path} must have shards made with the tokenizer of {config.path}, got shards of "
            "another tokenizer"
        )


def _vocabulary(folder: Path) -> Any:
    """Return what maps text to ids, without the marks of special tokens, which an export adds."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model, load_tokenizer(folder).get_vocab(with_added_tokens=True)


def base_model(folder: str | None) -> dict[str, Any]:
    """Return what is known of a base model, for a model card: name, license, and its repository and commit.

    The last two are known in the hub's cache, which names the model; elsewhere the folder's card does. The
    folder's own name may be anything, and config.json often has the name of a fine-tuned model's own base.
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
