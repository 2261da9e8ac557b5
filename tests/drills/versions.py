"""The tests on other Pythons and other versions: whether the ranges in pyproject.toml are true.

    python -m tests.drills.versions FOLDER [--pythons python3.11 python3.12] [--resolutions oldest newest]
        [--pin torch==2.14.0 ...] [--tests ARGUMENT ...]

For every Python and resolution: the last commit is cloned into FOLDER, gets an environment of its own and
runs the test command there.

- `locked`: requirements.lock, and the linters too, as `launch/test.sh` has them;
- `newest`: the newest that the ranges allow together;
- `oldest`: every direct dependency at its floor, extras included, and what these need at its newest.

`--pin` puts versions of your own in place of those; what stands behind `--tests` goes to pytest. What was
printed stays beside the clone, as NAME.log. An environment takes 3 GB, or 7 GB where PyTorch brings CUDA:
delete FOLDER when done. The last line is JSON.
"""

import argparse
import itertools
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
from xml.etree.ElementTree import Element

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RESOLUTIONS = ("locked", "newest", "oldest")
TOLD = ("torch", "transformers", "deepspeed", "datasets", "wandb", "hydra-core")
LINTERS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports", "--no-cache"])
VERSIONS = "import json, platform, sys; from importlib.metadata import version; \
print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"


def ranges() -> list[Requirement]:
    """The direct dependencies, those of the extras too but the playground's: Gradio holds Pillow back, and no
    script installs it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [names for extra, names in project["optional-dependencies"].items() if extra != "playground"]
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


def install(tree: Path, python: str, resolution: str, pins: Sequence[str]) -> dict[str, str]:
    """A clone with an environment that its scripts take for up to date; returns what was installed."""
    if tree.exists():
        subprocess.run(["git", "-C", tree, "pull", "--quiet", "--ff-only"], check=True)
    else:  # of a checkout without a branch too, which cannot be pulled from
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    subprocess.run([python, "-m", "venv", tree / ".venv"], check=True)
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if resolution == "newest" else []
    pip = [tree / ".venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", *newest]
    subprocess.run([*pip, *asked(resolution, pins)], check=True)
    shutil.copy(tree / "requirements.lock", tree / ".venv" / "installed.lock")
    told = [tree / ".venv" / "bin" / "python", "-c", VERSIONS, *TOLD]
    return json.loads(subprocess.run(told, capture_output=True, check=True).stdout)


def run(tree: Path, command: Sequence[str], log: TextIO) -> int:
    """In the clone, by its own environment; the exit code."""
    path = f"{tree}/.venv/bin:{os.environ['PATH']}"
    environment = os.environ | {"VIRTUAL_ENV": f"{tree}/.venv", "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log).returncode


def run_tests(tree: Path, arguments: Sequence[str], log: TextIO) -> dict[str, Any]:
    """Counts, names, seconds. What fails runs once more: on a busy machine some tests only ran out of time."""
    began, report = time.perf_counter(), tree / "tests.xml"
    shared = ["--dist", "loadfile", "--no-loadscope-reorder", *arguments]
    code = run(tree, ["pytest", *shared, f"--junit-xml={report}"], log)
    failed = failures(report)
    found = {name: int(suite(report).attrib[name]) for name in ("tests", "skipped")}
    if failed:
        code = run(tree, ["pytest", "--last-failed", f"--junit-xml={report}"], log)
    seconds = round(time.perf_counter() - began)
    return {**found, "failed": failed, "failed alone": failures(report), "pytest": code, "seconds": seconds}


def suite(report: Path) -> Element:
    """The only one of pytest's report."""
    (found,) = ElementTree.parse(report).getroot()
    return found


def failures(report: Path) -> list[str]:
    """The tests that failed, or could not begin."""
    bad = [one for one in suite(report) if one.find("failure") is not None or one.find("error") is not None]
    return [f"{one.attrib['classname']}::{one.attrib['name']}" for one in bad]


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
    arguments = ["-n", args.processes, *args.tests]
    rows = []
    for python, resolution in itertools.product(args.pythons, args.resolutions):
        name = "-".join([Path(python).name, resolution, *args.pin])
        versions = install(folder / name, python, resolution, args.pin)
        linters = LINTERS if resolution == "locked" else ()
        with open(folder / f"{name}.log", "w") as log:
            complaints = [" ".join(linter) for linter in linters if run(folder / name, linter, log)]
            found = run_tests(folder / name, arguments, log)
        rows.append({"resolution": resolution, **versions, "complaints": complaints, **found})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
    print(json.dumps(rows))
    sys.exit(any(row["pytest"] or row["complaints"] for row in rows))


if __name__ == "__main__":
    main()
