"""Code shared by all packages: settings, the command line, and the output folders of stages.

    compose, schema, paths     Hydra's YAML and overrides -> a typed dataclass; limits; `~` in paths
    cli                        run a stage's command; report errors in one line
    interrupt                  Ctrl-C while a command imports its modules
    errors                     error messages for users
    hub                        settings that may name a model on the Hugging Face Hub
    stage, fingerprint, files  output folders and manifests; hashes of inputs; atomic writes
    tracker                    Weights & Biases
    console                    untrusted text on terminals
    encoding                   text to ids, for training documents and for prompts
    dtype, openmp, memory      properties of the device: dtype, waiting threads, free memory

This package depends on no stage: each stage passes in its own settings dataclass. Every command and
`import infer` import it before PyTorch.
"""

# isort: off
import conf.interrupt  # noqa: F401, first: Ctrl-C may come during the next imports

# isort: on
from conf.cli import run
from conf.compose import settings
from conf.errors import RankLocalError, UserError

__all__ = ["RankLocalError", "UserError", "run", "settings"]
