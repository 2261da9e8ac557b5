"""Exit with code 130 and one line, without a traceback, on Ctrl-C during a command's imports.

`cli.exit_on_error` handles Ctrl-C after the imports. Other programs that import this package keep their own
`sys.excepthook`.
"""

import os
import sys
from types import TracebackType

COMMANDS = ("data_prep", "train", "infer")
INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an uncaught error; installed as `sys.excepthook`."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)  # Python itself would end by the signal


def is_command(words: list[str]) -> bool:
    """Return True if the words are `python -m` with a module of this project."""
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return any(name.partition(".")[0] in COMMANDS for name in module)


def was_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused the error; Transformers' lazy imports raise another error for it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if is_command(sys.orig_argv):
    sys.excepthook = end
