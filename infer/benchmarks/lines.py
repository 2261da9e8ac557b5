"""Lines that are missing in files of one's own: infilling where no benchmark is at hand."""

import random
from collections.abc import Sequence

from infer.benchmarks.code import language_named
from infer.benchmarks.config import SourceConfig
from infer.benchmarks.problem import Problem
from infer.benchmarks.rows import Row
from infer.config import Infill

RULES = (
    "Lines of one's own files: of every text with at least three lines one line that is not blank, and neither "
    "the first nor the last, is missing, drawn by the text itself; the model is given what stands before and "
    "after it, suffix first (order=spm) or prefix first (order=psm). The answer ends at EOT or at the limit of "
    "new tokens, not at a newline. It is exact when it equals the missing line but for white space at either "
    "end; nothing is executed. Figures on files that a model was trained on say nothing of others."
)


def lines(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the fields content (or text), id, and language where it is not Python; pass over texts
    that are too short.
    """
    problems = []
    for row in rows:
        text = row.text("content", "text")
        parts = text.splitlines(keepends=True)
        inner = [at for at in range(1, len(parts) - 1) if parts[at].strip()]
        if inner:
            at = random.Random(text).choice(inner)
            problems.append(_problem(row, "".join(parts[:at]), parts[at], "".join(parts[at + 1 :]), config))
    return problems


def _problem(row: Row, before: str, missing: str, after: str, config: SourceConfig) -> Problem:
    return Problem(
        id=str(row.values.get("id", row.number)),
        prompt=Infill(before, after, config.order or "spm"),
        answer=missing,
        language=language_named(row.maybe("language") or "python"),
    )
