"""Whether two demos are the same in all that a change of structure must not move.

    python -m tests.drills.same DEMO OTHER

Compared to the last bit: token shards and held-out texts; losses and validations of every training; the weights
of every model directory; answers, verdicts and scores of the quality report; tokens of every text of the speed
report, with the counts of decoders that do not weigh times.

The last line is JSON; code 1 where anything differs.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.files import CHECKSUM

TIMES = {"tokens_per_second", "memory_gib", "mfu"}  # of a step
BY_TIME = {"adaptive", "auto", "ngrams", "ssd", "tsd", "gsd", "gsd probes"}  # weigh what they measured
COUNTS = ("forwards", "rows", "drafted", "accepted", "judged", "right")

Facts = Mapping[str, Any]  # by name; what two demos may not differ in


def data(demo: Path) -> Facts:
    """Return tokens, documents and names of the shards, and the held-out texts."""
    patterns = ("*.tokens.npy", "*.spans.npy", "*.names.npy", "*.jsonl")
    files = [path for pattern in patterns for path in (demo / "data").glob(pattern)]
    return {f"data/{path.name}": _digest(path) for path in files}


def trainings(demo: Path) -> Facts:
    """Return the losses and norms of every step, and every validation."""
    steps = dict[str, Any]()
    for log in demo.glob("*/log.jsonl"):
        for line in log.read_text().splitlines():
            step = json.loads(line)
            row = {name: value for name, value in step.items() if name not in TIMES}
            steps[f"{log.parent.name}, step {step['step']}"] = row
        steps[f"{log.parent.name}, validation"] = _json(log.with_name("manifest.json"))["validation"]
    return steps


def weights(demo: Path) -> Facts:
    paths = sorted(demo.rglob("*.safetensors"))
    return {str(path.relative_to(demo)): _digest(path) for path in paths}


def texts(demo: Path) -> Facts:
    return dict(item for path in (demo / "report/speed/units").glob("*.json") for item in _texts(path))


def quality(demo: Path) -> Facts:
    report = _json(demo / "report/quality/quality.json")
    results = {name: report[name] for name in ("rows", "differences", "same", "samples")}
    results |= {path.name: _json(path) for path in (demo / "report/quality/units").glob("*.json")}
    return {name: _unmarked(value) for name, value in results.items()}


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: "".join(text for _, text in entry) if name == "pieces" else _unmarked(entry)
            for name, entry in value.items()
        }
    return [_unmarked(entry) for entry in value] if isinstance(value, list) else value


def _texts(path: Path) -> Iterator[tuple[str, Any]]:
    unit = _json(path)
    for group in unit.get("groups", ()):
        for number, block in enumerate(group["blocks"]):
            for run in block:
                name = (
                    f"{path.name} {group['dtype']} {group['temperature']} {number} {run['decoder']} {run['k']}"
                )
                fixed = run["decoder"] not in BY_TIME
                yield name, [run["text"], run["tokens"], *(run[count] for count in COUNTS if fixed)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(path: Path) -> Any:
    return {
        name: value for name, value in json.loads(path.read_text(encoding="utf-8")).items() if name != CHECKSUM
    }


PARTS: Mapping[str, Callable[[Path], Facts]] = {
    "token shards, held-out texts": data,
    "training: losses, norms, validations": trainings,
    "exported weights": weights,
    "decoded texts of the speed report": texts,
    "answers, verdicts, scores": quality,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("other", type=Path)
    args = parser.parse_args()
    counts = dict[str, Any]()
    for part, facts in PARTS.items():
        entry, other = facts(args.demo), facts(args.other)
        if not entry:
            sys.exit(f"error: {args.demo} must be a finished demo, got no {part}")
        differ = sorted(name for name in entry.keys() | other.keys() if entry.get(name) != other.get(name))
        counts[part] = {"compared": len(entry), "differ": len(differ)}
        print(
            f"{part:<40} {len(entry) - len(differ):>6} of {len(entry)} the same"
            + f"  first: {differ[:1]}" * bool(differ)
        )
    print(json.dumps(counts))
    sys.exit(any(count["differ"] for count in counts.values()))


if __name__ == "__main__":
    main()
