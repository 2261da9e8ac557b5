"""Run the commands of papers.md again, and write what they print below them.

    python -m docs.papers OUT [--only WORDS]

papers.md has its commands in blocks of a console: a line that begins with "$ ", and what it printed. A
command runs in the project's root, after those above it. What was printed is kept in OUT, so that an
interrupted run goes on where it stopped; --only runs those again whose command has the words.
(As a module, not as a file: this folder's conf.py is Sphinx's, and must not hide the project's conf.)
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
FILES = ("MBPP", "MULTIPL_E", "INFILLING", "QWEN")  # variables of the commands
COLUMNS = "118"


def main() -> None:
    """Run the commands of the page that have not printed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="run these again: words of their command")
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
    """Return the file in OUT of what a command printed."""
    return out / f"{hashlib.sha256(command.encode()).hexdigest()[:16]}.txt"


def printed(command: str) -> str:
    """Return what a command writes to standard output; the program ends if it fails."""
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
    """Return the page with what its commands printed; those that have not run stay as they are."""

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
