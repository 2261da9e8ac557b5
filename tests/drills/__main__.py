"""Long checks on a finished demo, outside the test command: python -m tests.drills NAME [ARGUMENTS].

    lossless MODEL HELD_OUT    every decoder against plain decoding, 1,000 prompts in each cell
    soak MODEL HELD_OUT        hours of mixed decoding: memory stays flat, every text is plain decoding's
    kills FOLDER               kill -9 of every stage at 20 moments each, then the same command again
    places FOLDER              full disks, read-only folders, a clock set back, two runs in one folder
    fuzz                       damaged inputs of every kind: a sentence, never a traceback
    same DEMO OTHER            two demos, before and after a change of structure
    quick_start                docs/quick_start.md word for word in a fresh clone

Each has --help, and prints JSON last.
"""

import runpy
import sys

NAMES = ("lossless", "soak", "kills", "places", "fuzz", "same", "quick_start")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in ([], ["--help"], ["-h"]) else 2)
    name = sys.argv.pop(1)
    runpy.run_module(f"tests.drills.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
