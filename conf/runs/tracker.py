"""Track training and reports with Weights & Biases; errors of W&B never end the tracked run."""

import atexit
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from conf.errors import UserError, describe_error, visible
from conf.runs.files import read_json, write_json
from conf.runs.tensorboard import TensorboardRun
from conf.settings.schema import any_of, check_settings, setting

ONLINE_SECONDS = 30.0  # time limit to reach W&B; then the run continues offline
UPLOAD_SECONDS = 30.0  # time limit of the last upload at the end of a run
GRACE_SECONDS = 10.0  # additional time for W&B's process to end


MODES = ("offline", "online", "disabled")  # of W&B
TENSORBOARD = "tensorboard"
# Former names, which W&B still accepts.
OLD_MODES = {"dryrun": "offline", "run": "online"}
# The folder for offline runs that were replaced by a later run with the same id.
EARLIER = "earlier"


@dataclass
class TrackerConfig:
    """Weights & Biases, or TensorBoard. W&B's environment variables (WANDB_MODE, WANDB_DIR,
    WANDB_TAGS) apply where no setting is given.
    """

    #: mode of W&B: offline (only local files), online (needs a login) or disabled; or
    #: tensorboard; null: WANDB_MODE, or offline
    mode: str | None = setting(None, choices=(*MODES, TENSORBOARD))
    #: W&B project of the run; null: WANDB_PROJECT, or adaptive-tokens
    project: str | None = None
    #: W&B group of the run; null: WANDB_RUN_GROUP, or no group
    group: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, "tracker")
        if self.mode is None:
            given = os.environ.get("WANDB_MODE") or MODES[0]
            self.mode = OLD_MODES.get(given, given)
            if self.mode not in MODES:
                raise ValueError(
                    f"WANDB_MODE must be {any_of(MODES)}, got {self.mode}. Unset it, or set tracker.mode"
                )
        if self.project is None:
            self.project = os.environ.get("WANDB_PROJECT") or "adaptive-tokens"


@dataclass(frozen=True)
class HtmlTable:
    """A table with HTML in its last column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def for_wandb(self) -> Any:
        """Return the table as a wandb.Table."""
        import wandb

        rows = [[*values, wandb.Html(text)] for *values, text in self.rows]
        return wandb.Table(columns=list(self.columns), data=rows)

    def markdown(self) -> str:
        """Return the table as Markdown, with the HTML unchanged."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ([str(cell).replace("\n", "<br>") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def start_run(
    config: TrackerConfig, folder: Path, **facts: Any
) -> "WandbRun | TensorboardRun | None":
    """Start a run and return it, None if tracking is disabled.

    `facts` are WandbRun's keyword arguments. Raises UserError for tracker.mode=tensorboard
    without the package tensorboard.
    """
    if config.mode == TENSORBOARD:
        return TensorboardRun(folder)
    return None if config.mode == "disabled" else WandbRun(config, folder, **facts)


def log_row(run: Any, row: Mapping[str, Any], step: int) -> None:
    """Log the figures and tables of a step."""
    if not isinstance(run, TensorboardRun):
        row = {
            name: value.for_wandb() if isinstance(value, HtmlTable) else value
            for name, value in row.items()
        }
    run.log(row, step=step)


def log_files(
    run: Any,
    name: str,
    kind: str,
    folder: Path,
    facts: Mapping[str, Any],
    files: Collection[str] = (),
) -> None:
    """Log the files of a folder, or only the named `files`, as a W&B artifact.

    No-op with TensorBoard, which has no artifacts. Files are not copied: `wandb sync` of an
    offline run uploads them from their place.
    """
    if isinstance(run, TensorboardRun):
        return
    import wandb

    plain = re.sub(r"[^\w.-]", "-", name)
    artifact = wandb.Artifact(plain, type=kind, metadata=dict(facts))
    for file in sorted(folder.rglob("*")):
        place = file.relative_to(folder).as_posix()
        if file.is_file() and (not files or place in files):
            artifact.add_file(
                str(file), name=place, policy="immutable", skip_cache=True
            )
    run.log_artifact(artifact)


class WandbRun:
    """A W&B run in a separate thread, so that only `finish` waits for W&B, for a limited time.

    The thread resumes the run named in `folder`/wandb/`file`, or starts a new one, in WANDB_DIR or `folder`.
    If an online run cannot start, it starts an offline run; on any other error W&B is switched off. In both
    cases `tell` is called with one line for the user.

    Resuming an offline run creates another folder with the same id, and `wandb sync` replaces the run on the
    server by that folder. The caller therefore logs earlier rows again (`log_missing`), and the thread moves
    the earlier folders to wandb/earlier/ when the run finishes.
    """

    def __init__(
        self,
        config: TrackerConfig,
        folder: Path,
        *,
        name: str,
        job_type: str,
        settings: Mapping[str, Any],
        tell: Callable[[str], None],
        file: str = "run.json",
        upload_seconds: float = UPLOAD_SECONDS,
    ) -> None:
        # W&B also expands ~ in WANDB_DIR.
        self._folder = Path(os.path.expanduser(os.environ.get("WANDB_DIR") or folder))
        self._files = self._folder / "wandb"
        self._file = folder / "wandb" / file
        self.id = (
            _saved_id(self._file)
            or os.environ.get("WANDB_RUN_ID")
            or secrets.token_hex(4)
        )
        self._config = config
        self._upload_seconds = upload_seconds
        self._name = os.environ.get("WANDB_NAME") or visible(name)
        self._job_type = job_type
        self._settings = dict(settings)
        self._tell = tell
        self._variables: list[str] = []  # of the environment, set for this run
        self._actions: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def send(self, action: Callable[[Any], object]) -> None:
        """Call `action` with the W&B run in the thread; no-op if W&B is switched off."""
        if self._thread.is_alive():
            self._actions.put(action)

    def finish(self) -> None:
        """Finish the W&B run after all actions; kill W&B's process if it exceeds the time limit."""
        self._actions.put(None)
        limit = ONLINE_SECONDS + self._upload_seconds + GRACE_SECONDS
        self._thread.join(limit)
        if self._thread.is_alive():
            self._tell(
                f"tracker: W&B did not finish within {limit:.0f} s and is killed. Upload the rest later: "
                f"wandb sync --include-online {self._files}/*run-*"
            )
            self._tell = lambda sentence: None  # ignore errors of the killed process
            _kill_service()
            self._thread.join(GRACE_SECONDS)

    def _work(self) -> None:
        try:
            import wandb  # takes 1 s; fails on a full disk

            run = self._begin()
            # Runs before W&B's own hook, which would wait without a limit.
            atexit.register(self.finish)
            for action in iter(self._actions.get, None):
                action(run)
            own = Path(run.dir).parent
            run.finish()
            self._move_earlier(own)
        except Exception as error:  # of W&B, pydantic or the system
            self._tell(
                f"tracker: W&B failed ({describe_error(error)}): the run continues without it"
            )
        with suppress(Exception):
            wandb.teardown()
        for name in self._variables:
            os.environ.pop(name, None)

    def _move_earlier(self, own: Path) -> None:
        """Move earlier offline folders of this id, all except `own`, so that `wandb sync` skips them."""
        for folder in self._files.glob(f"offline-run-*-{self.id}"):
            if folder.name != own.name and own.name.endswith(f"-{self.id}"):
                earlier = self._files / EARLIER
                earlier.mkdir(exist_ok=True)
                folder.rename(earlier / folder.name)

    def _begin(self) -> Any:
        """Start or resume the W&B run, and return it."""
        import wandb

        self._files.mkdir(parents=True, exist_ok=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"id": self.id})
        self._variables = keep_within(self._folder)
        # On a full disk W&B's logger would print a traceback for every line.
        logging.raiseExceptions = False
        # With show_info W&B would ask for an API key on a terminal.
        wandb.setup(wandb.Settings(show_info=False))
        try:
            return self._init(self._config.mode, self.id)
        except Exception as error:
            if self._config.mode != "online":
                raise
            self._tell(
                f"tracker.mode=online: {describe_error(error)}; the run continues offline. Upload it later: "
                f"wandb sync {self._files}/offline-run-*"
            )
        # Another id, because W&B's process still uses the first one; a later online run resumes that one.
        return self._init("offline", secrets.token_hex(4))

    def _init(self, mode: Any, run_id: str) -> Any:
        import wandb

        return wandb.init(
            project=self._config.project,
            group=self._config.group,
            job_type=self._job_type,
            name=self._name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(self._folder),
            config=self._settings,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=ONLINE_SECONDS,
                finish_timeout=self._upload_seconds,
            ),
        )


def log_missing(run: Any, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Log the rows (step, values) from the run's next step on; an offline run gets all rows."""
    first = run.step
    for step, row in rows:
        if step >= first:
            log_row(run, row, step)


def _kill_service() -> None:
    """Kill W&B's service, a child process of this one."""
    import psutil

    for process in psutil.Process().children():
        if process.name() == "wandb-core":
            process.kill()


def _saved_id(file: Path) -> str | None:
    """Return the run id in a file; None if the file is missing or has no id."""
    try:
        return str(read_json(file)["id"])
    except (UserError, KeyError):
        return None


def keep_within(folder: Path) -> list[str]:
    """Make W&B stage its files below `folder`, unless environment variables set other folders.

    Its default is the user's home, which may be read-only, or missing for a user unknown to the system.
    Returns the variables that it set, which are not for the next run of the process.
    """
    beside = folder.absolute() / "wandb"
    names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")
    own = [name for name in names if name not in os.environ]
    os.environ |= dict.fromkeys(own, str(beside))
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = str(beside)
    return own
