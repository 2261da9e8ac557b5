"""Weights & Biases: its settings, for training, export and reports alike, and how a run begins or goes on."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError, visible
from conf.files import read_json, write_json

ONLINE_SECONDS = 30  # for W&B to answer, before a run goes on without it


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    mode: str = "offline"  # offline (files alone), online (needs a login) or disabled
    project: str = "adaptive-tokens"  # that runs are listed in
    entity: str | None = None  # user or team that owns the project; null: the account's own choice
    # that runs are listed under; null: one group for the training, the export and the report of a model
    group: str | None = None
    tags: list[str] = field(default_factory=list)  # of the run

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"tracker.mode must be offline, online or disabled, got {self.mode}")
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):  # W&B's own rule
            raise ValueError(
                "tracker.project must be a name of at most 128 characters without any of / \\ # ? % :, "
                f"got {self.project}"
            )
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:  # W&B's own rule
                raise ValueError(f"tracker.tags must be of 1 to 64 characters, got '{tag}'. Shorten it.")


def run_file(folder: Path, name: str = "run") -> Path:
    """Return the file beside W&B's own that has a run's id and group."""
    return folder / "wandb" / f"{name}.json"


def begin_run(
    config: TrackerConfig,
    folder: Path,
    *,
    file: Path,
    name: str,
    job_type: str,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
    linked: Path | None = None,
    run_id: str | None = None,
) -> Any:
    """Begin a run of W&B whose files lie in `folder`, or go on with the one that `file` has, and write that.

    The group is the setting's, else that of the run in the file `linked`, else that of `file`, else a new one.
    Where W&B does not answer the run is offline, which `tell` says.
    """
    import wandb  # 1 s, for those alone who track

    saved, other = _read(file), _read(linked)
    run_id = run_id or saved.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    group = config.group or os.environ.get("WANDB_RUN_GROUP") or other.get("group") or saved.get("group")

    def begin(mode: Any) -> Any:
        return wandb.init(
            project=config.project,
            entity=config.entity,
            group=group or visible(f"{name}-{run_id}"),
            job_type=job_type,
            tags=config.tags or None,
            name=visible(name),
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off", init_timeout=ONLINE_SECONDS),
        )

    keep_within(folder)
    try:
        run = begin(config.mode)
    except wandb.errors.Error as error:
        tell(f"tracker.mode={config.mode}: {str(error).splitlines()[0]}; the run goes on offline")
        run = begin("offline")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"id": run.id, "group": run.group})
    return run


def _read(file: Path | None) -> dict[str, str]:
    """Return a run's id and group; nothing where there is no such file, or another's."""
    try:
        facts = read_json(file) if file else {}
    except UserError:
        return {}
    return {key: value for key, value in facts.items() if isinstance(value, str)}


def keep_within(folder: Path) -> None:
    """Have W&B put what it stages beside a run's log, below `folder`, unless the environment says where.

    It would be the user's home, which may not be writable, or, of a user whom the system does not know, not be.
    """
    beside = folder.absolute() / "wandb"
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ.setdefault(name, str(beside))
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = str(beside)
