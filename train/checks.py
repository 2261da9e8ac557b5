"""What is refused before a run begins: settings, shards and a model that do not go together.

Knows manifests and configurations; loads neither weights nor the engine.
"""

from typing import Any

import numpy as np
from transformers import PretrainedConfig

from conf import UserError
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import adaptive_ids
from train.families import check_family
from train.model import check_tokenizer, model_config

SAMPLE = 64  # sequences that are searched for adaptive ids; training looks at every batch


def check_start(config: TrainConfig, data: dict[str, Any]) -> PretrainedConfig:
    """The model's architecture, if it, the settings and the shards (`data`, their manifest) fit each other.

    Raises UserError for the first thing that does not.
    """
    vocab = Vocab.from_json(data["vocab"])
    architecture = model_config(config.model, vocab=vocab)
    check_family(architecture, seq_len=data["settings"]["seq_len"])
    check_tokenizer(config.model, config.data.path)
    check_adaptive(config.data.path, vocab, config.objective)
    return architecture


def check_adaptive(path: str, vocab: Vocab, objective: ObjectiveConfig) -> None:
    """Raises UserError unless the adaptive ids are ids of their own, enough, and in no text of the shards."""
    if objective.name == "causal":
        return
    others = vocab.control - set(vocab.adaptive)
    named = {vocab.bos, vocab.eos, vocab.pre, vocab.suf, vocab.mid, vocab.eot}
    wrong = [id for id in vocab.adaptive if not 0 <= id < vocab.size or id in named]
    if wrong or len(set(vocab.adaptive)) < len(vocab.adaptive):
        raise UserError(
            f"data.path={path}: wanted adaptive ids below {vocab.size}, each once and none of the control pieces "
            f"{sorted(others)}, found {list(vocab.adaptive)}"
        )
    try:
        used = adaptive_ids(vocab, objective)
    except ValueError as error:
        raise UserError(str(error)) from error
    shards = Shards(path, "train")
    for index in np.linspace(0, len(shards) - 1, min(SAMPLE, len(shards)), dtype=np.int64):
        found = np.intersect1d(shards[int(index)].tokens, used)
        if len(found):
            raise UserError(
                f"data.path={path}: wanted adaptive ids that no text produces, found {found[0]} in the text of "
                f"sequence {index}"
            )
