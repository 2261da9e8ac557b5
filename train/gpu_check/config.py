"""The settings of `python -m train.gpu_check`."""

from dataclasses import dataclass, field

from conf.schema import PATH

PARTS = ("attention", "optimizer", "dual", "branch", "resume")


@dataclass
class TrainCheckConfig:
    """python -m train.gpu_check: steps, memory and checkpoints of training on this GPU, with random weights."""

    out: str = field(metadata=PATH)  # the JSON file to write
    device: str = "cuda"  # cuda, or cpu to try the check itself with model=demo tokens=64
    model: str = "deepseek_coder_1b"  # shape that dual and branch train: a choice of training's group model
    tokens: int = 4096  # in a sequence of what is trained
    steps: int = 5  # optimizer steps that are timed, after a first
    peak_tflops: float | None = None  # of the device, in bfloat16; null: from a table of datasheets
    minutes: float = 15.0  # that one part may take
    # attention: flex against dense; optimizer: fused AdamW against plain; dual, branch: steps of them under
    # ZeRO 1; resume: a save and what follows it
    parts: list[str] = field(default_factory=lambda: list(PARTS))

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device must be cuda or cpu, got {self.device}")
        for name in self.parts:
            if name not in PARTS:
                raise ValueError(f"parts must be of {', '.join(PARTS)}, got {name}")
        for name, least in {"tokens": 16, "steps": 1, "minutes": 0.01}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
