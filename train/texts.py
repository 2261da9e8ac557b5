"""Show which tokens of held-out texts are accepted drafts.

Each validation replays decoding with adaptive tokens alone along the same texts
(validation.py). It adds a line to texts.jsonl, and a table with coloured accepted drafts to
the tracker.
"""

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from conf.runs.files import write_bytes
from conf.runs.tracker import HtmlTable
from data_prep.vocab import load_tokenizer

SHOWN = 4  # texts per validation
COLUMNS = ("sequence", "acceptance length", "text")
ACCEPTED = "#56b4e9"  # same colour as on the terminal (infer/view.py)
STYLE = "white-space: pre-wrap; font: 13px monospace; color: #000; background: #fff"


tokenizer_of = cache(load_tokenizer)


@dataclass(frozen=True)
class ReplayedText:
    """A stretch of a held-out sequence, as spans of (text, whether it was drafted and accepted)."""

    sequence: int
    acceptance_length: float
    spans: list[tuple[str, bool]]


def replayed_text(
    sequence: int,
    tokens: np.ndarray,
    loops: Sequence[tuple[int, int]],
    folder: Path,
) -> ReplayedText:
    """Return the text of a sequence from its first loop to the end of its last one.

    `loops` are (position, accepted drafts) from validation.replay_loops. The first token of
    a loop is the model's own; the drafts follow. `folder` contains the tokenizer.
    """
    first, last = loops[0][0], sum(loops[-1]) + 2
    accepted = np.zeros(len(tokens), dtype=bool)
    for position, drafts in loops:
        accepted[position + 1 : position + 1 + drafts] = True
    tokenizer = tokenizer_of(folder)
    stretch = zip(tokens[first:last].tolist(), accepted[first:last].tolist())
    spans = [
        (tokenizer.decode([id for id, _ in run], skip_special_tokens=False), kind)
        for kind, run in groupby(stretch, lambda token: token[1])
    ]
    length = 1 + sum(drafts for _, drafts in loops) / len(loops)
    return ReplayedText(sequence, length, spans)


def append_texts(path: Path, step: int, texts: Sequence[ReplayedText]) -> None:
    """Write the texts of a validation to texts.jsonl, replacing lines of `step` and later."""
    lines = [
        json.dumps({"step": at, "texts": [asdict(text) for text in kept]})
        for at, kept in [*_earlier(path, step), (step, texts)]
    ]
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def read_texts(path: Path) -> Iterator[tuple[int, list[ReplayedText]]]:
    """Yield the step and the texts of each validation, skipping damaged lines."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row: dict[str, Any] = json.loads(line)
            yield row["step"], [ReplayedText(**text) for text in row["texts"]]
        except (ValueError, KeyError, TypeError):
            continue


def table(texts: Sequence[ReplayedText]) -> HtmlTable:
    """Return a validation's texts as a table for the tracker."""
    rows = [
        (text.sequence, round(text.acceptance_length, 3), to_html(text))
        for text in texts
    ]
    return HtmlTable(COLUMNS, rows)


def to_html(text: ReplayedText) -> str:
    """Return a text as HTML with a coloured background for accepted drafts."""
    spans = (
        f'<span style="background: {ACCEPTED}">{html.escape(part)}</span>'
        if accepted
        else html.escape(part)
        for part, accepted in text.spans
    )
    return f'<div style="{STYLE}">{"".join(spans)}</div>'


def _earlier(path: Path, step: int) -> list[tuple[int, list[ReplayedText]]]:
    return [(at, texts) for at, texts in read_texts(path) if at < step]
