"""The model to train: Transformers' own, loaded or with random weights, and its loss.

Knows the library's models; knows no engine, no data and no objective beyond a layout's rows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from conf import UserError
from data_prep.vocab import Vocab
from train.config import ModelConfig
from train.loss import weighted_cross_entropy
from train.metrics import tally


class AdaptiveLM(nn.Module):
    """A causal language model that returns a layout's loss instead of logits."""

    def __init__(self, lm: PreTrainedModel, *, chunk: int, L: int) -> None:
        super().__init__()
        self.lm = lm
        self._chunk, self._L = chunk, L

    def forward(self, ids: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(r, n) tensors of a Layout in; the loss and its tally (L + 1, 3) out."""
        hidden = self.lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        head: Callable[[Tensor], Tensor] = self.lm.get_output_embeddings()
        flat = labels.flatten()
        loss, losses, correct = weighted_cross_entropy(
            hidden.flatten(0, 1), head, flat, weights.flatten(), chunk=self._chunk
        )
        return loss, tally(losses, correct, flat, offsets.flatten(), L=self._L)


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
    if config.random_init or config.path is None:
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(found, attn_implementation=config.attention).to(dtype)
    else:
        try:
            lm = AutoModelForCausalLM.from_pretrained(
                config.path, dtype=dtype, attn_implementation=config.attention, local_files_only=True
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
