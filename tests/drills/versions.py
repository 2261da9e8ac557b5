"""The tests on other Pythons and other versions: whether the ranges in pyproject.toml are true.

    python -m tests.drills.versions FOLDER [--pythons python3.11 python3.12] [--resolutions oldest newest]
        [--pin torch==2.14.0 ...] [--tests ARGUMENT ...]

For every Python and resolution: the last commit is cloned into FOLDER, gets an environment of its own and
runs the test command there.

- `locked`: requirements.lock, and the linters too, as `launch/test.sh` has them;
- `newest`: the newest that the ranges allow together;
- `oldest`: every direct dependency at its floor, extras included, and what these need at its newest.

`--pin` puts versions of your own in place of those; what stands behind `--tests` goes to pytest. What was
printed stays beside the clone, as NAME.log. An environment takes 3 GB, or 8 GB where PyTorch brings CUDA:
delete FOLDER when done. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RESOLUTIONS = ("locked", "newest", "oldest")
TOLD = ("torch", "transformers", "deepspeed", "datasets", "wandb", "hydra-core")
LINTERS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports", "--no-cache"])
VERSIONS = "import json, platform, sys; from importlib.metadata import version; \
print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"


def ranges() -> list[Requirement]:
    """The direct dependencies, those of the extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(one) for group in (project["dependencies"], *extras) for one in group]


def floor(wanted: Requirement) -> str:
    """The oldest version of a range."""
    (version,) = (one.version for one in wanted.specifier if one.operator == ">=")
    return version


def asked(resolution: str, pins: Sequence[str] = ()) -> list[str]:
    """What pip is asked to install."""
    if resolution == "locked":
        wanted = [Requirement(line) for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines()]
    else:
        wanted = ranges()
    oldest = resolution == "oldest"
    found = {one.name: f"{one.name}=={floor(one)}" if oldest else str(one) for one in wanted}
    return [*(found | {Requirement(pin).name: pin for pin in pins}).values()]


def install(tree: Path, python: str, resolution: str, pins: Sequence[str]) -> Path:
    """A clone with an environment that its scripts take for up to date; returns its programs' folder."""
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
        subprocess.run([python, "-m", "venv", tree / ".venv"], check=True)
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if resolution == "newest" else []
    pip = [tree / ".venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", *newest]
    subprocess.run([*pip, *asked(resolution, pins)], check=True)
    shutil.copy(tree / "requirements.lock", tree / ".venv" / "installed.lock")
    return tree / ".venv" / "bin"


def run_tests(tree: Path, programs: Path, commands: Sequence[Sequence[str]], log: TextIO) -> dict[str, Any]:
    """Counts and seconds; a linter that is not content is told by its name."""
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"VIRTUAL_ENV": str(tree / ".venv")}
    began, ended = time.perf_counter(), dict[str, int]()
    for command in commands:
        done = subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log)
        ended[" ".join(command)] = done.returncode
    (suite,) = ElementTree.parse(tree / "tests.xml").getroot()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    complaints = [command for command, code in ended.items() if code and not command.startswith("pytest")]
    return {**counts, "complaints": complaints, "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("--resolutions", nargs="+", default=["oldest", "newest"], choices=RESOLUTIONS)
    parser.add_argument("--pin", nargs="+", default=[])
    parser.add_argument("--processes", default="2")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (ROOT.parent / "shared").is_dir() and not (folder / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    pytest = [
        "pytest",
        "-n",
        args.processes,
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--junit-xml=tests.xml",
    ]
    rows = []
    for python in args.pythons:
        for resolution in args.resolutions:
            name = "-".join([Path(python).name, resolution, *args.pin])
            tree = folder / name
            programs = install(tree, python, resolution, args.pin)
            linters = LINTERS if resolution == "locked" else ()
            told = subprocess.run([programs / "python", "-c", VERSIONS, *TOLD], capture_output=True, check=True)
            with open(folder / f"{name}.log", "w") as log:
                found = run_tests(tree, programs, [*linters, [*pytest, *args.tests]], log)
            rows.append({"resolution": resolution, **json.loads(told.stdout), **found})
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
    print(json.dumps(rows))
    sys.exit(any(row["failures"] or row["errors"] or row["complaints"] for row in rows))


if __name__ == "__main__":
    main()
