"""Where a run is followed: the settings of Weights & Biases, the same for training and reports."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    mode: str = "offline"  # offline (files alone), online (needs a login) or disabled
    project: str = "adaptive-tokens"  # that runs are listed in

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"tracker.mode: wanted offline, online or disabled, found {self.mode}")
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):  # W&B's own rule
            raise ValueError(
                "tracker.project must be a name of at most 128 characters without any of / \\ # ? % :, "
                f"got {self.project}"
            )


def keep_within(folder: Path) -> None:
    """Have W&B put what it stages beside a run's log, below `folder`, unless the environment says where.

    It would be the user's home, which may not be writable, or, of a user whom the system does not know, not be.
    """
    beside = folder.absolute() / "wandb"
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ.setdefault(name, str(beside))
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = str(beside)
