"""The settings of `python -m train.export`."""

import re
from dataclasses import dataclass, field

from conf.schema import PATH
from conf.tracker import TrackerConfig
from train.config import DataConfig

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class ExportConfig:
    """python -m train.export: a checkpoint -> a model directory that others can serve."""

    checkpoint: str = field(metadata=PATH)  # a finished folder of training
    out: str = field(metadata=PATH)  # the model directory to write
    data: DataConfig = field(default_factory=DataConfig)  # where the shards are now, if not where they were
    dtype: str = "bfloat16"  # or float16, float32; bf16, fp16 and fp32 for short
    lora: str | None = None  # merged or kept; by default merged where that is possible: not for gated LoRA
    # a Jinja file for chats; by default the base tokenizer's, else one that completes the messages as one text
    chat_template: str | None = field(default=None, metadata=PATH)
    shard_size: str = "5GB"  # largest file of weights: digits and KB, MB, GB or TB, powers of 1000
    verify: bool = True  # read the result back: weights, logits and held-out acceptance must be the training's
    verify_sequences: int | None = None  # to measure acceptance on; by default what a few minutes allow
    # infer.report's folder of the finished `out`: its figures go into the model card
    report: str | None = field(default=None, metadata=PATH)
    push: str | None = None  # upload the finished `out` to the hub as ORG/NAME
    artifact: bool = False  # log the finished `out` to Weights & Biases
    private: bool = True  # on the hub, those alone see it who may
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        self.dtype = DTYPES.get(self.dtype, self.dtype)
        if self.lora not in (None, "merged", "kept"):
            raise ValueError(f"lora: wanted merged or kept, found {self.lora}")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype: wanted bfloat16, float16 or float32, found {self.dtype}")
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.shard_size, re.IGNORECASE):
            raise ValueError(f"shard_size: wanted digits and KB, MB, GB or TB, found {self.shard_size}")
        if self.artifact and self.tracker.mode == "disabled":
            raise ValueError(
                "artifact must be false with tracker.mode=disabled, got true. Use offline or online."
            )
        if self.verify_sequences is not None and self.verify_sequences < 2:
            raise ValueError(f"verify_sequences: wanted at least 2, found {self.verify_sequences}")
        if self.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push, re.ASCII):
            raise ValueError(f"push: wanted a name on the hub as ORG/NAME, found {self.push}")
