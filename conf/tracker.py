"""Where a run is followed: the settings of Weights & Biases, the same for training and reports."""

from dataclasses import dataclass


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    mode: str = "offline"  # offline (files alone), online (needs a login) or disabled
    project: str = "adaptive-tokens"  # that runs are listed in

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"tracker.mode: wanted offline, online or disabled, found {self.mode}")
