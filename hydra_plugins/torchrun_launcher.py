"""A Hydra launcher that runs each job of a sweep as a command, for jobs under torchrun.

    python -m train -m hydra/launcher=torchrun optimizer.lr=1e-3,2e-3 out='runs/${optimizer.lr}' ...

The jobs run one after another; each is `hydra.launcher.command` followed by the job's settings and the
sweep's hydra.searchpath and --config-dir. The result of its first rank (see conf/settings/cli.py) is the
job's value for a sweeper such as Optuna.
Hydra only finds launchers in the namespace package hydra_plugins, so this folder has no __init__.py.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from conf.errors import UserError
from conf.settings.cli import RESULT_FILE, allows_failures
from conf.settings.compose import in_quotes


@dataclass
class CommandLauncherConf:
    """The settings of `hydra/launcher=torchrun`."""

    _target_: str = "hydra_plugins.torchrun_launcher.CommandLauncher"
    #: command that runs a job, such as "bash launch/train.sh" or "sbatch --wait launch/train_slurm.sh"
    command: str = "bash launch/train.sh"


class CommandLauncher(Launcher):
    """Run the jobs of a sweep one after another, each as a command."""

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)

    def setup(self, *, config: DictConfig, hydra_context: Any, **_: object) -> None:
        """Store the sweep's configuration, Hydra's config loader and the user's folders of settings."""
        self._config = config
        searchpath = ",".join(map(in_quotes, config.hydra.searchpath))
        self._folders = [f"hydra.searchpath=[{searchpath}]"] if searchpath else []
        self._folders += [
            f"--config-dir={source.path}"
            for source in config.hydra.runtime.config_sources
            if source.provider == "command-line"
        ]
        self._loader = hydra_context.config_loader

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs and return their results; exit with the code of the first that fails.

        A sweeper that allows failures gets the jobs that a mistake in their settings or a divergence ended.
        Raises UserError if two jobs have the same `out`.
        """
        # Load all settings first, so that an error in any job's settings stops the sweep early.
        configs = [
            self._loader.load_sweep_config(self._config, list(overrides))
            for overrides in job_overrides
        ]
        outs = Counter(config.get("out") for config in configs)
        ((out, times),) = outs.most_common(1)
        if times > 1:
            raise UserError(
                f"out must differ between the jobs of a sweep, got {out} for {times} of them. "
                "Name a swept setting in it: out='runs/${seed}'."
            )
        return [
            self._run(list(overrides), config)
            for overrides, config in zip(job_overrides, configs)
        ]

    def _run(self, overrides: Sequence[str], config: DictConfig) -> JobReturn:
        job = JobReturn(overrides, config, status=JobStatus.COMPLETED)
        # In the current folder, because the job may run on another machine, which has its own /tmp.
        with TemporaryDirectory(prefix=".sweep-", dir=".") as folder:
            file = Path(folder).absolute() / "result.json"
            words = map(as_word, filter_overrides(overrides))
            # Last, because argparse refuses an option between two settings.
            command = [*self._command, *words, *self._folders]
            print(f"sweep: {shlex.join(command)}", flush=True)
            code = subprocess.call(command, env=os.environ | {RESULT_FILE: str(file)})
            if code == 2 and allows_failures(self._config.hydra.sweeper):
                job.status = JobStatus.FAILED
                job.return_value = UserError("the job's command ended with code 2")
            elif code:
                sys.exit(code)
            elif file.is_file():
                job.return_value = json.loads(file.read_bytes())
        return job


def as_word(override: str) -> str:
    r"""Return a sweep's override as a command-line argument.

    Sweepers escape braces and other characters, but conf.settings.cli reads backslashes literally:
    out=runs/$\{seed\} becomes out='runs/${seed}'.
    """
    value = OverridesParser.create().parse_override(override).value()
    # A number, a list, a quoted text, and a text without escapes, which stays readable.
    if not isinstance(value, str) or "\\" not in override:
        return override
    return f"{override.partition('=')[0]}={in_quotes(value, interpolates=True)}"


ConfigStore.instance().store(
    group="hydra/launcher", name="torchrun", node=CommandLauncherConf
)
