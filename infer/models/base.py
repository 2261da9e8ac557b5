"""Whether a base model can be given the ids of the model that was tuned from it."""

from collections.abc import Iterable, Mapping, Sequence

from conf import UserError
from infer.models.checkpoint import load_text
from infer.models.draft import rows_of_both, told_as
from infer.text import Text


def base_pieces(folder: str, text: Text) -> Mapping[int, str]:
    """The base's pieces by id, before any weight is read; `text` is the tuned model's tokenizer.

    Raises UserError for what is no model directory with a tokenizer, and where an id is another piece.
    """
    with told_as("base", folder):
        pieces = load_text(folder).pieces
    try:
        rows_of_both(text.pieces, pieces)
    except ValueError as error:
        raise UserError(f"base={folder}: wanted the token ids of the model, {error}") from error
    return pieces


def lacking(pieces: Mapping[int, str], prompts: Iterable[tuple[str, Sequence[int]]]) -> str | None:
    """The first id of prompts, given as (name, ids), that is no piece, in words; None where all are.

    The tuned model may have more ids than its base, such as those of infilling.
    """
    strange = ((id, name) for name, ids in prompts for id in ids if id not in pieces)
    return next((f"no id {id} of {name}" for id, name in strange), None)
