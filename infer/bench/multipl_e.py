"""Add the verdicts of MultiPL-E's container to the rows of part=quality.

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
JsonRow = dict[str, Any]  # a row of the report that is changed here


def with_container_verdicts(rows: Sequence[JsonRow], solutions: Path) -> list[JsonRow]:
    """Return the rows with pass@1 for each judged language, and rows with the average.

    A language is judged if every answer of its folder in `solutions` has results. The average
    weights languages equally, as the paper's Table 2 does, and needs all languages.
    """
    rows = [with_verdicts(row, solutions) for row in rows]
    languages = [row for row in rows if row["benchmark"].startswith(f"{KIND}-")]
    averages = []
    for _, group in statistics.grouped(languages, "who", "decoder"):
        values = [row["value"] for row in group]
        if len(group) > 1 and None not in values:
            totals = {
                name: sum(row[name] for row in group)
                for name in ("cut_off", "unfit", "problems", "same", "compared")
            }
            average = {
                "benchmark": f"{KIND}-average",
                "value": sum(values) / len(values),
                "interval": None,
            }
            averages.append(dict(group[0]) | average | totals)
    return [*rows, *averages]


def with_verdicts(row: JsonRow, solutions: Path) -> JsonRow:
    """Return a row, with pass@1 added if the container has judged all of its answers."""
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
    """Return True if the answer in a result file passes. Raises UserError for a damaged file."""
    try:
        (result,) = json.loads(gzip.decompress(file.read_bytes()))["results"]
        return bool(result["status"] == "OK" and result["exit_code"] == 0)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} must be a result of MultiPL-E's container with one answer, got "
            f"{in_one_line(error)}. Delete it and run the container again."
        ) from error
