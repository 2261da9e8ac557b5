"""Shared by all packages: settings, the command line, and the folders of stages.

    compose, schema, paths     Hydra's YAML and overrides -> a typed dataclass, its limits, `~` in its paths
    cli                        a stage's command: errors in one sentence
    interrupt                  Ctrl-C while a command imports its modules
    errors                     sentences for users
    hub                        settings that may name a model on the hub
    stage, fingerprint, files  a folder whose manifest is written last; what identifies an input; whole files
    tracker                    Weights & Biases
    console                    text that others wrote, on terminals
    encoding                   text to ids, for training documents and prompts alike
    dtype, openmp, memory      what suits a device: type of the weights, waiting threads, free memory

Knows no stage: the dataclass that gives names and types comes from the stage itself. Every command and
`import infer` import this package before PyTorch.
"""

# isort: off
import conf.interrupt  # noqa: F401, first: a Ctrl-C may come while the others are imported

# isort: on
from conf.cli import run
from conf.compose import settings
from conf.errors import RankLocalError, UserError

__all__ = ["RankLocalError", "UserError", "run", "settings"]
