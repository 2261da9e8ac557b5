"""Sample drafts as text: what a model drafts after a prefix, beside what the text says. Pure."""

from collections.abc import Callable, Sequence

from torch import Tensor

COLUMNS = ("prefix", "drafts", "text", "accepted")
Row = tuple[str, str, str, int]
PREFIX = 16  # tokens shown before a window


def sample_drafts(
    batch: dict[str, Tensor], predicted: Tensor, *, count: int, decode: Callable[[Sequence[int]], str]
) -> list[Row]:
    """Up to `count` of the widest windows of a batch of `branch` (train.objective.layout), by COLUMNS.

    `predicted` (r, c) is the likeliest token of each column. The prefix ends with the token
    that stands where a_1 does, which decoding knows for certain when it meets the drafts.
    """
    ids, labels, offsets, positions = (
        batch[name].tolist() for name in ("ids", "labels", "offsets", "positions")
    )
    windows = []
    for row, column in (batch["offsets"] == 1).nonzero().tolist():
        end = column + 1
        while end < len(ids[row]) and offsets[row][end] > 1:
            end += 1
        windows.append((column - end, row, column, end))
    found = []
    for _, row, column, end in sorted(windows)[:count]:
        known = positions[row][column] + 1
        drafts, text = predicted[row, column:end].tolist(), labels[row][column:end]
        accepted = next((n for n, (a, b) in enumerate(zip(drafts, text)) if a != b), len(text))
        found.append((decode(ids[row][max(0, known - PREFIX) : known]), decode(drafts), decode(text), accepted))
    return found
