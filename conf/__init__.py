"""Settings: Hydra YAML plus command-line overrides in, one typed dataclass out.

    entry      the command line: `run` calls a stage's main, or prints help, settings, or one line of error
    compose    YAML and overrides -> a dataclass
    overrides  the command line's text -> Hydra's grammar
    mistakes   Hydra's and OmegaConf's messages -> one sentence
    schema     what a stage's dataclass holds: names, types, settings by name
    choices    what a stage's YAML holds: groups with their choices, examples
    describe   every setting with type, default and what it means, for the help and for docs/settings;
               comments: what the source of a dataclass says of its fields
    help       --help on a terminal
    links      the page of the documentation that an error is explained on; pages: those beside the settings'
    errors     what a user is told
    paths      settings that name a file or a folder: what the system refuses; streams: standard output
    hub        settings that may name a model on the hub
    sweep      -m: a process for each combination of settings
    files      files that are there whole, or as they were before
    stage      what every stage leaves behind: a folder whose manifest is written last

Knows no stage: the dataclass that gives names and types comes from the stage itself. `DictConfig`
never leaves `compose`.
"""

import sys
from pathlib import Path
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback for Ctrl-C while a command is still importing; `run` handles it later."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


# Only for our own commands, `python -m train`: a program that imports us keeps its traceback.
if Path(sys.argv[0] if sys.argv else "").resolve().is_relative_to(Path(__file__).resolve().parents[1]):
    sys.excepthook = _end_quietly

from conf.compose import settings  # noqa: E402
from conf.entry import run  # noqa: E402
from conf.errors import RankLocalError, UserError  # noqa: E402

__all__ = ["RankLocalError", "UserError", "run", "settings"]
