"""Does a second run of the speed report tell the same? Each row's speedup against the other run's interval.

    python -m tests.drills.repeatability OUT model=DIR prompts=humaneval ... (the settings of infer.speed)

Both runs have the same prompts, so that what differs is the machine's. A finished run is not measured again.
The last line is JSON.
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
    counts = {"rows": 0, "within": 0, "overlap": 0, "largest_change": 0.0}
    print(f"{'':52} {'first':>20} {'second':>20}  within  overlap")
    for key in first.keys() & second.keys():
        told = compare(first[key], second[key])
        if told is None:
            continue
        inside, overlap, change = told
        counts["rows"] += 1
        counts["within"] += inside
        counts["overlap"] += overlap
        counts["largest_change"] = max(counts["largest_change"], change)
        print(f"{' '.join(map(str, key)):52} {shown(first[key])} {shown(second[key])}  {inside!s:6}  {overlap}")
    print(json.dumps(counts))


def rows_of(folder: Path) -> dict[tuple, Row]:
    report = json.loads((folder / "speed" / "speed.json").read_text(encoding="utf-8"))
    return {tuple(row[name] for name in KEY): row for row in report["rows"] if row["decoder"] != "plain"}


def compare(first: Row, second: Row) -> tuple[bool, bool, float] | None:
    """Whether each speedup lies in the other's interval, whether the intervals overlap, and the change."""
    if not first["speedup_interval"] or not second["speedup_interval"]:
        return None
    (low, high), (other_low, other_high) = first["speedup_interval"], second["speedup_interval"]
    within = low <= second["speedup"] <= high and other_low <= first["speedup"] <= other_high
    return within, low <= other_high and other_low <= high, abs(second["speedup"] / first["speedup"] - 1)


def shown(row: Row) -> str:
    low, high = row["speedup_interval"]
    return f"{row['speedup']:6.2f} {low:6.2f}-{high:4.2f}"


if __name__ == "__main__":
    main()
