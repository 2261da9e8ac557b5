"""Where a run is followed: the settings of Weights & Biases, the same for training and reports."""

from dataclasses import dataclass


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    mode: str = "offline"
    project: str = "adaptive-tokens"

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"tracker.mode: wanted offline, online or disabled, found {self.mode}")
