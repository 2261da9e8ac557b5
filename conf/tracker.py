"""Weights & Biases: its settings, for all stages alike, and a run that never ends theirs."""

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
from conf.files import read_json, write_json
from conf.schema import any_of, check_settings, setting
from conf.tensorboard import TensorboardRun

ONLINE_SECONDS = 30.0  # for W&B to answer, before a run goes on offline
UPLOAD_SECONDS = 30.0  # at the end of a run, for what was not sent before
GRACE_SECONDS = 10.0  # for W&B's process to end, beyond the time it is given


MODES = ("offline", "online", "disabled")  # of W&B
TENSORBOARD = "tensorboard"
OLD_MODES = {"dryrun": "offline", "run": "online"}  # W&B still takes these
EARLIER = "earlier"  # the folder of offline runs that a later one of their id replaces


@dataclass
class TrackerConfig:
    """Weights & Biases; its own variables (WANDB_MODE, WANDB_DIR, WANDB_TAGS) hold for
    what is not set here.
    """

    #: of W&B: offline (files alone), online (needs a login) or disabled; or tensorboard;
    #: null: WANDB_MODE, or offline
    mode: str | None = setting(None, choices=(*MODES, TENSORBOARD))
    #: project that runs are listed in; null: WANDB_PROJECT, or adaptive-tokens
    project: str | None = None
    #: group that runs are listed under; null: WANDB_RUN_GROUP, or no group
    group: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, "tracker")
        if self.mode is None:
            given = os.environ.get("WANDB_MODE") or MODES[0]
            self.mode = OLD_MODES.get(given, given)
            if self.mode not in MODES:
                raise ValueError(
                    f"WANDB_MODE must be {any_of(MODES)}, got {self.mode}. Unset it, or give tracker.mode"
                )
        if self.project is None:
            self.project = os.environ.get("WANDB_PROJECT") or "adaptive-tokens"


@dataclass(frozen=True)
class HtmlTable:
    """A table whose last column is HTML."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def for_wandb(self) -> Any:
        """Return W&B's table."""
        import wandb

        rows = [[*values, wandb.Html(text)] for *values, text in self.rows]
        return wandb.Table(columns=list(self.columns), data=rows)

    def markdown(self) -> str:
        """Return the table as Markdown, in which HTML stands as it is."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ([str(cell).replace("\n", "<br>") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def start_run(
    config: TrackerConfig, folder: Path, **facts: Any
) -> "WandbRun | TensorboardRun | None":
    """Return the run of the settings, with `facts` as WandbRun takes them; None if disabled.

    Raises UserError for tracker.mode=tensorboard without its package.
    """
    if config.mode == TENSORBOARD:
        return TensorboardRun(folder)
    return None if config.mode == "disabled" else WandbRun(config, folder, **facts)


def log_row(run: Any, row: Mapping[str, Any], step: int) -> None:
    """Log figures and tables of a step."""
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
    """Log the files of a folder, or the named ones, as an artifact, which W&B alone has.

    Files are not copied: an offline run sends them from where they are.
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
    """A run of W&B, begun and fed by a thread of its own: only `finish` waits for W&B, for a limited time.

    The thread continues the run that `folder`/wandb/`file` names, or begins one, in WANDB_DIR or `folder`.
    If an online run does not begin, the thread begins an offline run; on any other failure W&B is off. `tell`
    prints one line for either.

    A continued offline run is another folder of the same id, and `wandb sync` replaces what the server has of
    the id by that folder. So the caller logs earlier rows again (`log_missing`), and `finish` moves the
    earlier folders away.
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
        run_id: str | None = None,
        file: str = "run.json",
        upload_seconds: float = UPLOAD_SECONDS,
    ) -> None:
        # As W&B reads the variable.
        self._folder = Path(os.path.expanduser(os.environ.get("WANDB_DIR") or folder))
        self._files = self._folder / "wandb"
        self._file = folder / "wandb" / file
        self.id = (
            run_id
            or _saved_id(self._file)
            or os.environ.get("WANDB_RUN_ID")
            or secrets.token_hex(4)
        )
        self._config = config
        self._upload_seconds = upload_seconds
        self._name = os.environ.get("WANDB_NAME") or visible(name)
        self._job_type = job_type
        self._settings = dict(settings)
        self._tell = tell
        self._actions: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def send(self, action: Callable[[Any], object]) -> None:
        """Have the thread call an action with W&B's run; dropped if W&B is off."""
        if self._thread.is_alive():
            self._actions.put(action)

    def finish(self) -> None:
        """Close the run after all actions; kill W&B's process if it takes too long."""
        self._actions.put(None)
        limit = ONLINE_SECONDS + self._upload_seconds + GRACE_SECONDS
        self._thread.join(limit)
        if self._thread.is_alive():
            self._tell(
                f"tracker: W&B did not end within {limit:.0f} s: the run ends without it. Send the rest later: "
                f"wandb sync --include-online {self._files}/*run-*"
            )
            self._tell = lambda sentence: None  # of the killed process
            _kill_service()
            self._thread.join(GRACE_SECONDS)

    def _work(self) -> None:
        try:
            import wandb  # 1 s, for those alone who track; fails on a full disk

            run = self._begin()
            atexit.register(
                self.finish
            )  # before W&B's own hook, which would wait without a limit
            for action in iter(self._actions.get, None):
                action(run)
            own = Path(run.dir).parent
            run.finish()
            self._move_earlier(own)
        except (
            Exception
        ) as error:  # W&B's, the system's and pydantic's: none may end the run
            self._tell(
                f"tracker: W&B failed ({describe_error(error)}): the run continues without it"
            )
        with suppress(Exception):
            wandb.teardown()

    def _move_earlier(self, own: Path) -> None:
        """Move the offline folders of the run's id, except its `own`, out of the way of `wandb sync`."""
        for folder in self._files.glob(f"offline-run-*-{self.id}"):
            if folder.name != own.name and own.name.endswith(f"-{self.id}"):
                earlier = self._files / EARLIER
                earlier.mkdir(exist_ok=True)
                folder.rename(earlier / folder.name)

    def _begin(self) -> Any:
        """Return W&B's run, online or offline."""
        import wandb

        self._files.mkdir(parents=True, exist_ok=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"id": self.id})
        keep_within(self._folder)
        logging.raiseExceptions = (
            False  # W&B's log on a full disk prints a traceback for every line
        )
        wandb.setup(
            wandb.Settings(show_info=False)
        )  # with it W&B would ask for a key on a terminal
        try:
            return self._init(self._config.mode, self.id)
        except Exception as error:
            if self._config.mode != "online":
                raise
            self._tell(
                f"tracker.mode=online: {describe_error(error)}; the run goes on offline. Send it later: "
                f"wandb sync {self._files}/offline-run-*"
            )
        # Under another id: W&B's process holds the first one, which a resumed run continues once it is online.
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
    """Log the rows, with their steps, that W&B's run does not have: of an offline run all of them."""
    first = run.step
    for step, row in rows:
        if step >= first:
            log_row(run, row, step)


def _kill_service() -> None:
    """Kill W&B's process, a child of this one."""
    import psutil

    for process in psutil.Process().children():
        if process.name() == "wandb-core":
            process.kill()


def _saved_id(file: Path) -> str | None:
    """Return a run's id; None where there is no such file, or another's."""
    try:
        return str(read_json(file)["id"])
    except (UserError, KeyError):
        return None


def keep_within(folder: Path) -> None:
    """Have W&B put what it stages beside a run's log, below `folder`, unless the environment says where.

    It would be the user's home, which may not be writable, or, of a user whom the system does not know, not be.
    """
    beside = folder.absolute() / "wandb"
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ.setdefault(name, str(beside))
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = str(beside)
