"""The model to train: Transformers' own, loaded or with random weights.

Knows the library's models; knows no engine, no data and no objective.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from conf import UserError
from data_prep.vocab import Vocab
from train.attention import register
from train.config import ModelConfig


def model_config(config: ModelConfig, *, vocab: Vocab | None = None) -> PretrainedConfig:
    """The architecture: of the directory, or of `shape`; random weights take the data's vocabulary.

    Without a vocabulary (a plan) the shape serves where there is no directory.
    Raises UserError for a path that does not exist: at once, without asking the hub.
    """
    if config.random_init or (config.path is None and vocab is None):
        own = {}
        if vocab is not None:
            own = {"vocab_size": vocab.size, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
        try:
            return LlamaConfig(**{**config.shape, **own})
        except (TypeError, ValueError) as error:
            raise UserError(f"model.shape: wanted the fields of a LlamaConfig, found {error}") from error
    if config.path is None:
        raise UserError("setting 'model.path' is required: a Transformers directory with weights")
    if not (Path(config.path) / "config.json").is_file():
        raise UserError(
            f"model.path={config.path}: wanted a Transformers directory, found no config.json there"
        )
    return AutoConfig.from_pretrained(config.path, local_files_only=True)


def load_model(config: ModelConfig, *, vocab: Vocab, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model with its weights, for training. Raises UserError as `model_config` does."""
    found = model_config(config, vocab=vocab)
    logging.disable_progress_bar()
    attention = register(config.attention)
    if config.random_init or config.path is None:
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(found, attn_implementation=attention).to(dtype)
    else:
        try:
            lm = AutoModelForCausalLM.from_pretrained(
                config.path, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"model.path={config.path}: wanted a causal model, found {reason}") from error
    rows = lm.get_input_embeddings().num_embeddings
    if rows < vocab.size:
        raise UserError(
            f"model.path={config.path}: wanted at least {vocab.size} embedding rows, as the data's "
            f"vocabulary has, found {rows}"
        )
    if config.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        # Every layer by itself: they share one compiled graph. Branches differ in number from step to step.
        for layer in lm.get_decoder().layers:
            layer.compile(dynamic=True)
    return lm.train()


def check_tokenizer(config: ModelConfig, data_path: str) -> None:
    """Raises UserError when the model's tokenizer is not the one that made the shards."""
    if config.path is None or config.random_init:
        return
    theirs = Path(config.path) / "tokenizer.json"
    ours = Path(data_path) / "tokenizer" / "tokenizer.json"
    if not theirs.is_file():
        return
    if _vocabulary(theirs) != _vocabulary(ours):
        raise UserError(
            f"data.path={data_path}: wanted shards made with the tokenizer of {config.path}, "
            "found shards of another tokenizer"
        )


def _vocabulary(path: Path) -> Any:
    value = json.loads(path.read_text(encoding="utf-8"))
    return value["model"], value["added_tokens"]
