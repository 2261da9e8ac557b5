"""What a run that a signal stopped tells those who start it again: its exit code. Knows no ranks."""

import os
from pathlib import Path

EXIT_STOPPED = 75
"""The exit code of a run that a signal stopped and that goes on when it is started again.

EX_TEMPFAIL of sysexits.h: "the user is invited to retry".
"""

EXIT_FILE = "TRAIN_EXIT_FILE"
"""The environment's name of a file that is to hold the exit code: torchrun has one of its own."""


class Stopped(Exception):
    """The run was stopped by a signal and has saved what it did."""


def leave_exit_code(code: object) -> None:
    """Write the exit code where the launcher asked for it."""
    path = os.environ.get(EXIT_FILE)
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(f"{code}\n", encoding="utf-8")
