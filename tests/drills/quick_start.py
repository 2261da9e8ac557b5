"""The quick start and the tutorial, word for word, in a fresh clone.

    python -m tests.drills.quick_start [--demo RUNS_DEMO] [--keep FOLDER]

Runs the shell blocks of docs/quick_start.md and docs/your_repository.md in one shell, in an empty folder,
outside of this process's virtual environment. REPOSITORY is this checkout as it is committed. Then the files
that the pages promise must be there. With --demo a finished demo is copied into the clone, and this checkout's
.venv linked, in place of launch/demo.sh. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.markdown import blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("quick_start.md", "your_repository.md")]
DEMO = "bash launch/demo.sh\n"
PROMISED = (
    *(f"demo/{name}" for name in ("model/config.json", "report/index.html", "text.html", "graph.svg")),
    *(f"mine/{name}" for name in ("model/adaptive.json", "report/index.html")),
)


def read_pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def script(page: str, *, demo: Path | None) -> str:
    """Return the blocks of a page as one shell script that prints the number of each block."""
    commands = blocks(page)
    assert commands[0].startswith("git clone REPOSITORY") and DEMO in commands, "the page begins otherwise"
    lines = ["set -euo pipefail"]
    for number, block in enumerate(commands, 1):
        lines.append(f"echo '== block {number} of {len(commands)}' >&2")
        if block == DEMO and demo is not None:
            lines.append(f"mkdir runs && cp -rL '{demo}' runs/demo && ln -s '{ROOT}/.venv' .venv")
        else:
            lines.append(block.replace("REPOSITORY", f"'{ROOT}'"))
    return "\n".join(lines)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without the virtual environment of this process."""
    own = variables.get("VIRTUAL_ENV", "")
    others = {name: value for name, value in variables.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    places = variables.get("PATH", "").split(os.pathsep)
    return others | {"PATH": os.pathsep.join(place for place in places if place != f"{own}/bin")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    page, demo = read_pages(), arguments.demo and arguments.demo.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        code = subprocess.run(
            ["bash", "-c", script(page, demo=demo)], cwd=folder, env=environment(os.environ), check=False
        ).returncode
        results = folder / "adaptive-tokens" / "runs"
        missing = [item for item in PROMISED if not (results / item).is_file()]
        result = {
            "blocks": len(blocks(page)),
            "code": code,
            "missing": missing,
            "whole": demo is None,
            "seconds": round(time.perf_counter() - began),
        }
    print(json.dumps(result))
    sys.exit(bool(code or missing))


if __name__ == "__main__":
    main()
