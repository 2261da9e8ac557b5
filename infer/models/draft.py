"""Which model may draft for another: a smaller one with the same token ids, or the target's own first layers.

    draft=DIR       a model directory whose tokenizer has the same piece at every id that both have
    draft=self:N    the target's first N layers with its final norm and head, in the target's own memory

Self-SSD in the paper's Table 1 (GSD §5) is Zhang et al. (2023), who search for the blocks to skip; the first
layers as they are draft worse for the same number of layers. Under torchrun every rank loads all of a draft
model; the first layers are divided as the target is.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from logging import getLogger
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from conf import UserError
from infer.config import DraftConfig
from infer.engine.forward import context_length, shares
from infer.engine.memory import enough_for_weights
from infer.models.checkpoint import Adaptive, ModelDirectory
from infer.text import Text

STAND_IN = 0  # read for an id that the draft model does not have: any is as good, since none is right


@dataclass(frozen=True)
class Draft:
    """A model that drafts, on the target's device. Its head has the ids below `rows` alone; those that only one
    of the two can spell are read and proposed like any other, and the target refuses them.
    """

    lm: PreTrainedModel = field(repr=False)
    rows: int  # one more than the last id that both models have
    context: int  # positions, perhaps fewer than the target's
    adaptive: Adaptive | None = (
        None  # what it drafts with under draft_adaptive; None: token by token
    )

    def read(self, ids: Sequence[int]) -> list[int]:
        """Return the target's ids with a stand-in for those that this model lacks."""
        return [id if id < self.rows else STAND_IN for id in ids]


def check_draft(config: DraftConfig, text: Text) -> int:
    """Return `Draft.rows` for a target's tokenizer, before any weight is read. Raises UserError for a directory
    without a tokenizer or with another one's ids, and for `adaptive` without adaptive.json.
    """
    if config.layers is not None:
        return rows_of_both(text.pieces, text.pieces)
    directory = ModelDirectory(str(config.model), setting="draft")
    pieces = directory.text.pieces
    if config.adaptive:
        directory.need_adaptive()
    return _rows_of_both(text, pieces, directory.name)


def _rows_of_both(text: Text, pieces: Mapping[int, str], name: str) -> int:
    try:
        return rows_of_both(text.pieces, pieces)
    except ValueError as error:
        raise UserError(
            f"{name} must have the token ids of the model, {error}"
        ) from error


def rows_of_both(target: Mapping[int, str], draft: Mapping[int, str]) -> int:
    """Return one more than the last id that both have a piece for. Raises ValueError, with the end of a
    sentence, for the first id that is another piece in the draft's vocabulary, and where they share none.
    """
    both = sorted(target.keys() & draft.keys())
    for id in both:
        if target[id] != draft[id]:
            raise ValueError(f"whose id {id} is {target[id]!r}, got {draft[id]!r}")
    if not both:
        raise ValueError("got none of them")
    return both[-1] + 1


def load_draft(
    config: DraftConfig,
    target: PreTrainedModel,
    *,
    rows: int,
    adaptive: Adaptive | None,
) -> Draft:
    """Load the model that drafts for `target`, which has the `adaptive` tokens; `rows` is `check_draft`'s.

    A model larger than the target is warned of. Raises UserError for what `ModelDirectory.load` refuses, for
    want of memory on any rank, and for as many layers as the target has.
    """
    if config.layers is None:
        directory = ModelDirectory(str(config.model), setting="draft")
        dtype = str(target.dtype).removeprefix("torch.")
        device = str(target.device)
        fits = enough_for_weights(directory.path, dtype, device)
        with failing_together(target), fits:
            lm = directory.load(dtype=dtype, device=device, whole=True)
            adaptive = directory.need_adaptive() if config.adaptive else None
        if (size := lm.num_parameters()) > (limit := target.num_parameters()):
            message = "draft=%s must have fewer parameters than the model's %s, got %s, which drafts slowly"
            getLogger(__name__).warning(
                message, directory.path, f"{limit:,}", f"{size:,}"
            )
    else:
        layers = target.config.num_hidden_layers
        if config.layers >= layers:
            raise UserError(
                f"draft must have fewer layers than the model's {layers}, got {config.model}"
            )
        lm = first_layers(target, config.layers)
    if config.adaptive and adaptive is None:
        tuned = "a model fine-tuned with adaptive tokens"
        raise UserError(f"draft_adaptive=true needs {tuned}, got no adaptive.json")
    _narrow_head(lm, rows)
    return Draft(
        lm, rows, context_length(lm.config), adaptive if config.adaptive else None
    )


@contextmanager
def failing_together(lm: PreTrainedModel) -> Iterator[None]:
    """Raise on every rank the UserError of the first rank that meets one in the block.

    A rank that failed alone would leave the others waiting, and torchrun would end them without a sentence.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    errors: list[UserError | None] = [error]
    if shares(lm) > 1:
        errors *= shares(lm)
        dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise error


def first_layers(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return the first layers of a model with its final norm and head, on the same tensors: `deepcopy` takes
    them from its memo, also buffers that no checkpoint has and an adapter's weights.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in chain(lm.parameters(), lm.buffers())
    }
    short = copy.deepcopy(lm, shared)
    config = short.config
    blocks = short.get_decoder().children()
    del next(
        b
        for b in blocks
        if isinstance(b, nn.ModuleList) and len(b) == config.num_hidden_layers
    )[layers:]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return short


def _narrow_head(lm: PreTrainedModel, rows: int) -> None:
    if rows >= lm.config.vocab_size:
        return
    head: Any = lm.get_output_embeddings()
    for name in ("weight", "bias"):
        if getattr(head, name) is not None:
            setattr(
                head,
                name,
                nn.Parameter(getattr(head, name)[:rows], requires_grad=False),
            )
    head.out_features = rows


def base_pieces(folder: str, text: Text) -> Mapping[int, str]:
    """Return the base's pieces by id, before any weight is read; `text` is the tuned model's tokenizer.

    Raises UserError for what is no model directory with a tokenizer, and where an id is another piece.
    """
    pieces = ModelDirectory(folder, setting="base").text.pieces
    _rows_of_both(text, pieces, f"base={folder}")
    return pieces


def lacking(
    pieces: Mapping[int, str], prompts: Iterable[tuple[str, Sequence[int]]]
) -> str | None:
    """Return, in words, the first id of the (name, ids) prompts that is no piece; None where all are."""
    return next(
        (
            f"no id {id} of {name}"
            for name, ids in prompts
            for id in ids
            if id not in pieces
        ),
        None,
    )
