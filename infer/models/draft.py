"""Load the model that drafts for a target.

    draft=DIR       a model directory; its tokenizer must have the target's piece at every shared id
    draft=self:N    the target's first N layers, its final norm and its head, on the same weights

The paper's self-SSD (GSD Table 1) uses Zhang et al. (2023), who search for the blocks to
skip; the first N layers draft worse. Under torchrun every rank loads a whole draft model,
but draft=self:N is divided as the target is.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from conf.errors import UserError
from infer.engine.forward import context_length
from infer.engine.packed import JointLinear, dtype_of
from infer.models.checkpoint import ModelDirectory
from infer.text import Text

#: The id that a draft model reads in place of an id that it does not have; any id would work.
STAND_IN = 0


@dataclass(frozen=True)
class Draft:
    """A draft model on the target's device.

    Its head has `rows` ids. If only one of the two models has an id below `rows`, the draft
    model may still draft it, and the target rejects it.
    """

    lm: PreTrainedModel = field(repr=False)
    rows: int  # one more than the last id that both models have
    context: int  # the context length in tokens, possibly shorter than the target's

    def read(self, ids: Sequence[int]) -> list[int]:
        """Return the target's token ids with STAND_IN in place of ids that the draft model does not have."""
        return [id if id < self.rows else STAND_IN for id in ids]


class DraftSource:
    """A draft model before its weights are read: a directory, or a number of the target's layers.

    `text` is the target's tokenizer. Raises UserError for a directory without a tokenizer or
    with different token ids.
    """

    def __init__(self, model: str | Path | int, text: Text) -> None:
        self._model = (
            model if isinstance(model, int) else ModelDirectory(model, setting="draft")
        )
        pieces = text.pieces
        name = "the model"
        if isinstance(self._model, ModelDirectory):
            pieces = self._model.text.pieces
            name = self._model.name
        self._rows = shared_rows(text.pieces, pieces, name)

    def load(self, target: PreTrainedModel) -> Draft:
        """Load the draft model of `target`.

        Raises UserError for a directory that `ModelDirectory.load` refuses, and for at least as
        many layers as the target has.
        """
        if isinstance(self._model, ModelDirectory):
            device = str(target.device)
            lm = self._model.load(dtype=dtype_of(target), device=device, whole=True)
        else:
            layers = target.config.num_hidden_layers
            if self._model >= layers:
                raise UserError(
                    f"draft must have fewer layers than the model's {layers}, "
                    f"got self:{self._model}. Lower N."
                )
            lm = first_layers(target, self._model)
        _narrow_head(lm, self._rows)
        return Draft(lm, self._rows, context_length(lm.config))


def shared_rows(target: Mapping[int, str], draft: Mapping[int, str], name: str) -> int:
    """Return one more than the last id that both tokenizers have.

    Raises UserError for an id with two different pieces, and without any shared id. `name` is
    the name of the second model in the error.
    """
    shared = sorted(target.keys() & draft.keys())
    different = (
        f"{draft[id]!r} instead of {target[id]!r} for id {id}"
        for id in shared
        if target[id] != draft[id]
    )
    if reason := next(different, "" if shared else "no shared id"):
        raise UserError(
            f"{name} must have the model's token ids, got {reason}. Use "
            "a model with the same tokenizer."
        )
    return shared[-1] + 1


def first_layers(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model's first layers with its final norm and head, on the same tensors."""
    # `deepcopy` takes these objects from its memo: parameters, buffers, packed layers, the process
    # groups of a divided adapter, and a head in C. The last three cannot be copied, and no draft
    # model uses the head. The output head is copied, since it may be cut.
    packed = (m for m in lm.get_decoder().modules() if isinstance(m, JointLinear))
    groups = (getattr(module, "group", None) for module in lm.modules())
    head = getattr(lm, "previous_token_head", None)
    kept = chain(lm.parameters(), lm.buffers(), packed, groups, [head])
    shared: dict[int, Any] = {id(item): item for item in kept}
    short = copy.deepcopy(lm, shared)
    config = short.config
    for module in short.get_decoder().children():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == config.num_hidden_layers
        ):
            del module[layers:]
            break
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return short


def _narrow_head(lm: PreTrainedModel, rows: int) -> None:
    """Cut the head to the first `rows` ids."""
    head: Any = lm.get_output_embeddings()
    if rows < lm.config.vocab_size:
        head.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias[:rows], requires_grad=False)
        head.out_features = rows


def base_pieces(folder: str, text: Text) -> Mapping[int, str]:
    """Return a base model's pieces by id; `text` is the fine-tuned model's tokenizer.

    Raises UserError for a folder without a tokenizer, and for different token ids.
    """
    directory = ModelDirectory(folder, setting="base")
    shared_rows(text.pieces, directory.text.pieces, directory.name)
    return directory.text.pieces


def missing_id(
    pieces: Mapping[int, str], prompts: Iterable[tuple[str, Sequence[int]]]
) -> str | None:
    """Describe the first id of the (name, ids) prompts that is not in `pieces`; None without one."""
    for name, ids in prompts:
        for id in ids:
            if id not in pieces:
                return f"no id {id} of {name}"
    return None
