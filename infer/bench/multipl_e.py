"""The verdicts of MultiPL-E's container, read back into the rows of quality.

The container writes NAME.results.json.gz beside each NAME.json.gz of a folder of answers,
with an entry of `results` for each answer.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import UserError, in_one_line
from infer.bench import statistics

KIND = "multipl_e"
SUFFIX = ".results.json.gz"
Row = dict[str, Any]


def with_container_verdicts(rows: Sequence[Row], solutions: Path) -> list[Row]:
    """Return the rows with pass@1 of judged languages, and the average of the languages.

    A language is judged if every answer of its folder in `solutions` has its results. The
    average weighs languages equally, as the paper's Table 2, and needs all of them.
    """
    rows = [with_verdicts(row, solutions) for row in rows]
    languages = [row for row in rows if row["benchmark"].startswith(f"{KIND}-")]
    averages = []
    for _, group in statistics.grouped(languages, "who", "decoder"):
        values = [row["value"] for row in group]
        if len(group) > 1 and None not in values:
            totals = {
                name: sum(row[name] for row in group)
                for name in ("cut_off", "problems", "same", "compared")
            }
            average = {
                "benchmark": f"{KIND}-average",
                "value": sum(values) / len(values),
                "interval": None,
            }
            averages.append(dict(group[0]) | average | totals)
    return [*rows, *averages]


def with_verdicts(row: Row, solutions: Path) -> Row:
    """Return a row, with pass@1 if the container has judged all its answers."""
    if not row["benchmark"].startswith(KIND):
        return row
    folder = solutions / f"{row['benchmark']}-{row['who']}-{row['decoder']}"
    passed = [first_passes(file) for file in sorted(folder.glob(f"*{SUFFIX}"))]
    if not passed or len(passed) < row["problems"]:
        return row
    interval = statistics.share(sum(passed), len(passed))
    value = sum(passed) / len(passed)
    return row | {"metric": "pass@1", "value": value, "interval": interval}


def first_passes(file: Path) -> bool:
    """Return True if the answer passes. Raises UserError for a damaged file."""
    try:
        (result,) = json.loads(gzip.decompress(file.read_bytes()))["results"]
        return bool(result["status"] == "OK" and result["exit_code"] == 0)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} must be a result of MultiPL-E's container with one answer, got "
            f"{in_one_line(error)}. Delete it and run the container again."
        ) from error
