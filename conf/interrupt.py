"""Ctrl-C while a command imports its modules: exit code 130 and at most one line, no traceback.

`cli.exit_on_error` begins later. Other programs that import us keep their own hook.
"""

import os
import sys
from types import TracebackType

COMMANDS = ("data_prep", "train", "infer")
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an error that nobody has caught, as `sys.excepthook`."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)  # Python would end by the signal itself


def is_command(words: list[str]) -> bool:
    """Return True for the words of `python -m` and one of our modules."""
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return any(name.partition(".")[0] in COMMANDS for name in module)


def was_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C led to the error: Transformers' lazy imports raise another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if is_command(sys.orig_argv):
    sys.excepthook = end
