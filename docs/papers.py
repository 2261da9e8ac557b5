"""Rerun the commands of papers.md and update their output on the page.

    python -m docs.papers OUT [--only WORDS]

papers.md has its commands in console blocks: a line that begins with "$ ", then the command's output.
Commands run in the project's root, in the order of the page. OUT stores their output, so that an
interrupted run continues where it stopped; --only reruns the commands that contain WORDS.
(Run it as a module: as a file, it would import this folder's conf.py, which is Sphinx's, as `conf`.)
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from conf.runs.files import write_bytes

PAGE = Path(__file__).parent / "papers.md"
ROOT = PAGE.parents[1]
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n.*?^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRESS = re.compile(r"[\w /:-]+: \d+ of \d+\b|bench: (loading|measuring) ")
FILES = (
    "MBPP",
    "MULTIPL_E",
    "INFILLING",
    "QWEN",
)  # environment variables in the commands
COLUMNS = "118"


def main() -> None:
    """Run the page's commands that have no stored output yet, and update the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="rerun commands that contain this text")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        command = block["command"]
        kept = kept_output(args.out, command)
        if not kept.is_file() or (args.only and args.only in command):
            print(f"$ {command}", flush=True)
            write_bytes(kept, printed(command).encode())
        write_bytes(PAGE, filled(text, args.out).encode())


def kept_output(out: Path, command: str) -> Path:
    """Return the file in OUT that stores a command's output."""
    return out / f"{hashlib.sha256(command.encode()).hexdigest()[:16]}.txt"


def printed(command: str) -> str:
    """Run a command and return its standard output; exit if it fails."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS},
        check=False,
    )
    if done.returncode:
        sys.exit(f"docs.papers: exit code {done.returncode} of: {command}")
    return done.stdout


def filled(text: str, out: Path) -> str:
    """Return the page with the stored outputs; keep the block of a command without one."""

    def block(match: re.Match[str]) -> str:
        command = match["command"]
        kept = kept_output(out, command)
        if not kept.is_file():
            return match[0]
        output = kept.read_text(encoding="utf-8")
        for name in FILES:
            if path := os.environ.get(name):
                output = output.replace(path, f"${name}")
        lines = [
            line.rstrip() for line in output.splitlines() if not PROGRESS.match(line)
        ]
        output = "\n".join(lines).strip("\n")
        return f"```console\n$ {command}\n{output}\n```"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    main()
