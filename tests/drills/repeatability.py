"""Does a second run of the speed report tell the same? Each row's speedup against the other run's interval.

    python -m tests.drills.repeatability OUT experiment=demo model=DIR ... (the settings of infer.speed)

Both runs have the same prompts, so that what differs is the machine's. Of two runs that differ by chance alone
the second's speedup lies within the first's interval in some 83 of 100 rows at least, and nearly all intervals
overlap: an interval is of one run's noise, and a difference has that of both. A finished run is not measured
again. The last line is JSON.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEY = ("prompt_set", "dtype", "temperature", "decoder", "k")


def main() -> None:
    out, *settings = sys.argv[1:]
    folders = [Path(out) / name for name in ("first", "second")]
    for folder in folders:
        subprocess.run([sys.executable, "-m", "infer.speed", *settings, f"out={folder}"], check=True)
    first, second = (rows_of(folder) for folder in folders)
    told = {key: compare(row, second[key]) for key, row in first.items() if _known(row, second.get(key))}
    print(f"{'':52} {'first':>18} {'second':>18}  2nd in 1st  1st in 2nd  overlap")
    for key, (within, held, overlap, _) in told.items():
        flags = f"{within!s:>10}  {held!s:>10}  {overlap!s:>7}"
        print(f"{' '.join(map(str, key)):52} {shown(first[key])} {shown(second[key])}  {flags}")
    names = ("second_in_first", "first_in_second", "overlap")
    counts = {name: sum(one[place] for one in told.values()) for place, name in enumerate(names)}
    print(json.dumps({"rows": len(told), **counts, "largest_change": max(one[3] for one in told.values())}))


def _known(*rows: Row | None) -> bool:
    return all(row and row["speedup_interval"] for row in rows)


def rows_of(folder: Path) -> dict[tuple, Row]:
    report = json.loads((folder / "speed" / "speed.json").read_text(encoding="utf-8"))
    return {tuple(row[name] for name in KEY): row for row in report["rows"] if row["decoder"] != "plain"}


def compare(first: Row, second: Row) -> tuple[bool, bool, bool, float]:
    """Whether each speedup lies in the other's interval, whether the intervals overlap, and the change."""
    (low, high), (other_low, other_high) = first["speedup_interval"], second["speedup_interval"]
    return (
        low <= second["speedup"] <= high,
        other_low <= first["speedup"] <= other_high,
        low <= other_high and other_low <= high,
        abs(second["speedup"] / first["speedup"] - 1),
    )


def shown(row: Row) -> str:
    low, high = row["speedup_interval"]
    return f"{row['speedup']:6.2f} {low:6.2f}-{high:4.2f}"


if __name__ == "__main__":
    main()
