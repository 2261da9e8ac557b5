"""What of a stage's files must be the same each time: all but dates, measured times and what hangs on them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.files import CHECKSUM

View = Callable[[Path], Any]


def less(*names: str) -> View:
    """JSON, or JSON lines, less what has these names, and less the sum over all of it. Of a text in pieces the
    text: which of them were drafted hangs on what a policy has learned since its process began.
    """

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            value = value | {"pieces": text_of(value)} if "pieces" in value else value
            return {name: without(one) for name, one in value.items() if name not in names}
        return [without(one) for one in value] if isinstance(value, list) else value

    def view(path: Path) -> Any:
        text = path.read_text(encoding="utf-8")
        rows = [text] if path.suffix == ".json" else text.splitlines()
        found = [without(json.loads(row)) for row in rows]
        return [{name: one for name, one in row.items() if name != CHECKSUM} for row in found]

    return view


def text_of(sample: dict[str, Any]) -> str:
    """Of a text that is kept in pieces."""
    return "".join(text for _, text in sample["pieces"])


def present(path: Path) -> Any:
    """That it is there and whole: its content is measured."""
    return True


MANIFEST = less("created", "commit", "seconds")
LOG = less("tokens_per_second", "memory_gib")  # of the machine
LEARNING = ("adaptive", "auto", "ngrams")  # their drafts hang on measured times, and on what was seen before
COUNTED = ("tokens", "forwards", "drafted", "rows_per_forward", "acceptance_rate", "acceptance_by_position")
KEYS = ("prompt_set", "dtype", "temperature", "decoder", "k", "prompts", "rounds", "identical", "compared")


def speed(path: Path) -> Any:
    """Of speed.json what no clock decides: tokens and steps of every row, and the texts shown."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        {name: row[name] for name in (*KEYS, *COUNTED[: 1 if row["decoder"] in LEARNING else None])}
        for row in found["rows"]
    ]
    texts = [{**one, "pieces": text_of(one)} for one in found["samples"]]
    return rows, texts, found["units"], found["settings"]


def turn(path: Path) -> Any:
    """Of a unit of speed: what each decoder wrote."""
    groups = json.loads(path.read_text(encoding="utf-8")).get("groups", [])
    runs = [
        (run["decoder"], run["k"], run["tokens"], run["text"]) for g in groups for b in g["blocks"] for run in b
    ]
    return sorted(runs)


def parity(path: Path) -> Any:
    """Of gpu_check's file: all but dates, times, the commit. It is there before it is finished, and says so."""
    found = json.loads(path.read_text(encoding="utf-8"))
    del found["versions"]["commit"]
    return {name: found[name] for name in ("finished", "parity", "hardware", "versions", "settings")} | {
        "shapes": sorted(found.get("shapes", ()))
    }


def page(path: Path) -> Any:
    """A page less its date and its times."""
    told = r"Made .* by commit \S+|\d+ tokens/s, |first token after [\d.]+ s"
    return re.sub(told, "", path.read_text(encoding="utf-8"))


def uncommitted(path: Path) -> Any:
    """A text less the commit that it was made by."""
    return re.sub(r"commit \w+", "", path.read_text(encoding="utf-8"))
