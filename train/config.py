"""The settings of `python -m train`."""

from dataclasses import dataclass, field
from typing import Any

from conf import UserError
from conf.tracker import TrackerConfig


@dataclass
class DataConfig:
    """The shards to train on."""

    path: str = ""  # a finished folder of data_prep


@dataclass
class ModelConfig:
    """The model to train: a Transformers directory, or random weights of a shape."""

    path: str | None = None
    random_init: bool = False
    shape: dict[str, Any] = field(default_factory=dict)  # model_type (llama) and fields of its configuration
    attention: str = "sdpa"  # sdpa, eager or flash_attention_2
    activation_checkpointing: bool = False
    compile: bool = False  # torch.compile of the layers

    def __post_init__(self) -> None:
        if self.attention not in ("sdpa", "eager", "flash_attention_2"):
            raise ValueError(
                f"model.attention: wanted sdpa, eager or flash_attention_2, found {self.attention}"
            )


@dataclass
class ObjectiveConfig:
    """What is learned; the symbols are those of SDSAT §2.2."""

    name: str = "dual"
    L: int = 5  # widest window of adaptive tokens
    start_rate: float = 0.1  # probability that a position starts a window
    w: float = 1.0  # weight of the masked term
    masked_mean: str = "n"  # the masked term is divided by n (eq. 9), or by the masked positions
    diverse: bool = False  # a different token for each offset (App. B)
    soft: float = 0.0  # share of the model's own distribution on the clean sequence in a_j's target
    retention: float = 1.0  # PARD's r: a window's j-th token stays with probability max(r^j, floor)
    retention_floor: float = 0.2

    def __post_init__(self) -> None:
        if self.name not in ("causal", "basic", "dual", "branch"):
            raise ValueError(f"objective.name: wanted causal, basic, dual or branch, found {self.name}")
        if self.masked_mean not in ("n", "masked"):
            raise ValueError(f"objective.masked_mean: wanted n or masked, found {self.masked_mean}")
        if self.L < 1:
            raise ValueError(f"objective.L: wanted at least 1, found {self.L}")
        if self.w < 0:
            raise ValueError(f"objective.w: wanted at least 0, found {self.w}")
        if not 0 < self.start_rate <= 1:
            raise ValueError(f"objective.start_rate: wanted a probability above 0, found {self.start_rate}")
        for name in ("soft", "retention", "retention_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"objective.{name}: wanted between 0 and 1, found {getattr(self, name)}")
        if self.soft and self.name not in ("dual", "branch"):
            raise ValueError(
                f"objective.soft: wanted 0 for {self.name}, which has no clean sequence to learn from"
            )


@dataclass
class LoraSettings:
    """LoRA by peft, in place of training every weight."""

    rank: int = 0  # 0 trains every weight
    alpha: int = 16  # the low-rank term is scaled by alpha / rank
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)  # names of linear layers; none: all but the head
    gated: bool = False  # on adaptive rows only: the standard path stays the base model's bit for bit
    adaptive_rows: bool = True  # train the adaptive ids' input embeddings too

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank: wanted at least 0, found {self.rank}")
        if self.alpha < 1:
            raise ValueError(f"lora.alpha: wanted at least 1, found {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout: wanted a probability below 1, found {self.dropout}")
        if self.gated and not self.rank:
            raise ValueError("lora.gated=true: wanted lora.rank of at least 1, found 0")


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine to a floor."""

    lr: float = 5e-5
    min_lr: float = 1e-5
    warmup_steps: int = 400
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}: wanted at least 0, found {getattr(self, name)}")


@dataclass
class TrainConfig:
    """torchrun -m train: token shards and a model -> a fine-tuned checkpoint."""

    data: DataConfig
    model: ModelConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    tracker: TrackerConfig
    deepspeed: dict[str, Any]  # passed to DeepSpeed; batch sizes and clipping are filled in
    lora: LoraSettings = field(default_factory=LoraSettings)
    out: str = ""
    steps: int = 2000
    global_batch: int = 128  # sequences of shards per step, over all ranks
    micro_batch: int = 1  # sequences of shards per rank and forward
    loss_chunk: int = 1024  # positions whose logits exist at once
    save_every: int = 250
    keep_last: int = 2  # checkpoints
    keep_every: int = 0  # keep the checkpoints of every so many steps too; 0 keeps none
    resume: bool = True  # go on with an unfinished run in `out`, or refuse it
    max_loss_ratio: float = 3.0  # to the mean of recent steps; above it the run stops
    validate_every: int = 250
    validate_sequences: int = 64
    max_loss_rise: float = 0.01  # held-out standard-token loss, against the base model's, that is alarming
    plan: bool = False  # print what would run, and stop
    plan_ranks: int = 8  # ranks that plan=true assumes
    plan_device: str = "a100_80gb"  # and their device: a name that the plan lists, or GiB
    plan_utilisation: float = 0.4  # and the share of its peak that is used
    peak_tflops: float | None = None  # of a device in bfloat16; none: from a table of datasheets
    memory_check: bool = True  # refuse to train what cannot fit
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch", "micro_batch", "loss_chunk", "save_every", "keep_last", "plan_ranks")
        for name in (*counts, "validate_every", "validate_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, found {getattr(self, name)}")
        if self.keep_every < 0:
            raise ValueError(f"keep_every: wanted at least 0, found {self.keep_every}")
        if not self.max_loss_ratio > 1:
            raise ValueError(f"max_loss_ratio: wanted above 1, found {self.max_loss_ratio}")
        if not 0 < self.plan_utilisation <= 1:
            raise ValueError(f"plan_utilisation: wanted a share above 0, found {self.plan_utilisation}")
        if self.lora.gated and self.objective.name not in ("dual", "branch"):
            raise ValueError(
                "lora.gated=true: wanted objective dual or branch, whose adaptive rows lie beside a clean "
                f"sequence, found {self.objective.name}"
            )

    @property
    def bf16(self) -> bool:
        """Whether the engine trains bfloat16 weights; float32 ones otherwise."""
        return bool(self.deepspeed.get("bf16", {}).get("enabled"))

    @property
    def zero(self) -> dict[str, Any]:
        """The engine's settings of ZeRO."""
        return self.deepspeed.get("zero_optimization", {})

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return self.zero.get("stage", 0)

    def accumulations(self, ranks: int) -> int:
        """Micro-batches per rank and step. Raises UserError when the global batch does not divide."""
        if self.global_batch % (self.micro_batch * ranks):
            raise UserError(
                f"global_batch={self.global_batch}: wanted a multiple of micro_batch x ranks = "
                f"{self.micro_batch} x {ranks}"
            )
        return self.global_batch // (self.micro_batch * ranks)
