"""What all packages share: settings, the command line, and what every stage leaves behind.

    compose, schema            Hydra YAML and the command line -> a typed dataclass
    cli, help                  a stage's command: --help, -m, errors in one sentence
    errors                     sentences for users
    hub                        settings that may name a model on the hub
    stage, fingerprint, files  a folder whose manifest is written last; what identifies an input; whole files
    tracker                    Weights & Biases
    console                    text that others wrote, on terminals
    encoding                   text to ids, for training documents and prompts alike

Knows no stage: the dataclass that gives names and types comes from the stage itself.
"""

import sys
from pathlib import Path
from types import TracebackType


def _end_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print no traceback for Ctrl-C while a command is still importing; `run` handles it later."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


# Only for our own commands, `python -m train`: a program that imports us keeps its traceback.
if (
    Path(sys.argv[0] if sys.argv else "")
    .resolve()
    .is_relative_to(Path(__file__).resolve().parents[1])
):
    sys.excepthook = _end_quietly

from conf.cli import run  # noqa: E402
from conf.compose import settings  # noqa: E402
from conf.errors import RankLocalError, UserError  # noqa: E402

__all__ = ["RankLocalError", "UserError", "run", "settings"]
