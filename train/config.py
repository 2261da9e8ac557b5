"""The settings of `python -m train`."""

from dataclasses import dataclass, field
from typing import Any

from conf import UserError
from conf.schema import MODEL, PATH
from conf.tracker import TrackerConfig


@dataclass
class DataConfig:
    """The shards to train on."""

    path: str = field(default="", metadata=PATH)  # a finished folder of data_prep


@dataclass
class TrainDataConfig(DataConfig):
    """The shards to train on, and those of the model's own text."""

    # the model's own text (infer.regenerate), for the drafts of branch alone: a finished folder of data_prep
    # with the tokenizer and seq_len of data.path; null: none
    own: str | None = field(default=None, metadata=PATH)
    own_share: float = 0.25  # share of a step's sequences that are of data.own

    def __post_init__(self) -> None:
        if not 0 < self.own_share < 1:
            raise ValueError(
                f"data.own_share must be above 0 and below 1, got {self.own_share}. "
                "For no own text leave out data.own"
            )

    def own_sequences(self, global_batch: int) -> int:
        """How many sequences of a step are the model's own text."""
        return round(self.own_share * global_batch) if self.own else 0


@dataclass
class ModelConfig:
    """The model to train: a Transformers directory, or random weights of a shape."""

    # a Transformers directory with weights, or a hub name; needed unless random_init
    path: str | None = field(default=None, metadata=MODEL)
    random_init: bool = False  # random weights of `shape`, in place of a directory's
    # of random weights, and of plan: model_type (llama) and fields of its configuration
    shape: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"  # how it is computed: sdpa, eager or flash_attention_2
    activation_checkpointing: bool = False  # compute each layer twice and keep less: memory for time
    compile: bool = False  # the layers by torch.compile: slow at first, then faster

    def __post_init__(self) -> None:
        if self.attention not in ("sdpa", "eager", "flash_attention_2"):
            raise ValueError(
                f"model.attention: wanted sdpa, eager or flash_attention_2, found {self.attention}"
            )


@dataclass
class ObjectiveConfig:
    """What is learned; the symbols are those of SDSAT §2.2."""

    name: str = "dual"  # causal (eq. 7), basic (eq. 8), dual (eq. 9), or branch (eq. 9 in one pass)
    L: int = 5  # widest window of adaptive tokens
    wide_share: float = 0.0  # share of branch's windows that are wider than L; 0: offsets above L untrained
    L_max: int = 13  # widest of these windows: their widths are uniform on L + 1..L_max
    start_rate: float = 0.1  # probability that a position starts a window
    w: float = 1.0  # weight of the masked term
    masked_mean: str = "n"  # what the masked term is divided by: n (tokens, eq. 9) or masked (its positions)
    attention: str = "auto"  # of branch's windows: flex (CUDA), dense, or auto: flex on CUDA if it works there
    diverse: bool = False  # a token of its own for each offset (App. B), in place of one for all
    # how adaptive tokens learn: ce (cross-entropy), or for acceptance by the model's own distribution: tv, lk
    draft_loss: str = "ce"
    soft: float = 0.0  # share of the model's own prediction in a masked position's target, with draft_loss=ce
    ce_share: float = 0.0  # share of the steps, the first ones, in which tv or lk still learns by ce
    growth: float = 0.0  # share of the steps, the first ones, in which the widest window grows from 1 to L
    # of a window's places: uniform, or dynamic (what each place adds to the expected accepted length)
    place_weights: str = "uniform"
    retention: float = 1.0  # PARD's r: a window's j-th token stays with probability max(r^j, floor)
    retention_floor: float = 0.2  # the least such probability

    def __post_init__(self) -> None:
        if self.name not in ("causal", "basic", "dual", "branch"):
            raise ValueError(f"objective.name: wanted causal, basic, dual or branch, found {self.name}")
        if self.attention not in ("auto", "flex", "dense"):
            raise ValueError(f"objective.attention must be auto, flex or dense, got {self.attention}")
        if self.draft_loss not in ("ce", "tv", "lk"):
            raise ValueError(f"objective.draft_loss must be ce, tv or lk, got {self.draft_loss}")
        if self.place_weights not in ("uniform", "dynamic"):
            raise ValueError(f"objective.place_weights must be uniform or dynamic, got {self.place_weights}")
        if self.masked_mean not in ("n", "masked"):
            raise ValueError(f"objective.masked_mean: wanted n or masked, found {self.masked_mean}")
        if self.L < 1:
            raise ValueError(f"objective.L: wanted at least 1, found {self.L}")
        self._check_wide()
        if self.w < 0:
            raise ValueError(f"objective.w: wanted at least 0, found {self.w}")
        if not 0 < self.start_rate <= 1:
            raise ValueError(f"objective.start_rate: wanted a probability above 0, found {self.start_rate}")
        for name in ("soft", "ce_share", "growth", "retention", "retention_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"objective.{name}: wanted between 0 and 1, found {getattr(self, name)}")
        self._check_draft_loss()

    def _check_draft_loss(self) -> None:
        """Raises ValueError for settings of the draft loss that the objective, or the loss, cannot use."""
        taught = self.name in ("dual", "branch")
        if self.soft and not (taught and self.draft_loss == "ce"):
            place = f"objective={self.name}" if not taught else f"objective.draft_loss={self.draft_loss}"
            raise ValueError(
                f"objective.soft must be 0 with {place}, got {self.soft}. It mixes labels with the model's own "
                "prediction on a clean sequence: it needs objective=dual or branch, and objective.draft_loss=ce"
            )
        if self.draft_loss != "ce" and not taught:
            raise ValueError(
                f"objective.draft_loss must be ce with objective={self.name}, got {self.draft_loss}. Only dual "
                "and branch have a clean sequence whose prediction drafts can learn"
            )
        if self.ce_share and self.draft_loss == "ce":
            raise ValueError(
                f"objective.ce_share must be 0 with objective.draft_loss=ce, got {self.ce_share}. Set "
                "objective.draft_loss=tv or lk"
            )

    def _check_wide(self) -> None:
        """Raises ValueError for wide windows that the objective cannot train."""
        if not 0 <= self.wide_share <= 1:
            raise ValueError(f"objective.wide_share must be a share from 0 to 1, got {self.wide_share}")
        if not self.wide_share:
            return
        if self.name != "branch":
            raise ValueError(
                f"objective.wide_share must be 0 for objective={self.name}, got {self.wide_share}: only branch "
                "has windows of a set width. Use objective=branch"
            )
        if self.diverse:
            raise ValueError(
                f"objective.wide_share must be 0 with objective.diverse=true, got {self.wide_share}: no "
                "offset above L has an id of its own. Set objective.diverse=false or raise objective.L"
            )
        if self.L_max <= self.L:
            raise ValueError(
                f"objective.L_max must be above objective.L={self.L}, got {self.L_max}. Raise it, or set "
                "objective.wide_share=0"
            )


@dataclass
class LoraSettings:
    """LoRA by peft, in place of training every weight."""

    rank: int = 0  # of the low-rank term; 0: no LoRA, every weight is trained
    alpha: int = 16  # the low-rank term is scaled by alpha / rank
    dropout: float = 0.0  # of the low-rank term's input: a probability
    targets: list[str] = field(default_factory=list)  # names of linear layers; []: all but the head
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
            raise ValueError("lora.rank must be at least 1 with lora.gated=true, got 0")


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine to a floor."""

    lr: float = 5e-5  # learning rate after the warm-up
    min_lr: float = 1e-5  # learning rate in the last step, where the warm-up has ended before
    warmup_steps: int = 400  # steps in which the learning rate rises from 0
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.95  # decay of the mean of their squares
    weight_decay: float = 0.1  # of matrices; norms, biases and embeddings have none
    clip: float = 1.0  # longest norm of the gradient; 0: any

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}: wanted at least 0, found {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}: wanted from 0 to below 1, found {getattr(self, name)}")


@dataclass
class TrainConfig:
    """torchrun -m train: token shards and a model -> a fine-tuned checkpoint.

    The defaults are SDSAT's (§3.2): AdamW, 2,000 steps, warm-up 400, 5e-5 to 1e-5, 4M tokens a step in
    sequences of 16,384: 128 sequences, each as Y and as M.
    """

    data: TrainDataConfig = field(
        default_factory=TrainDataConfig
    )  # The shards to train on; needed unless plan.
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    # DeepSpeed's own settings, passed on; batch sizes and clipping are filled in
    deepspeed: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)
    out: str = field(default="", metadata=PATH)  # the folder to write; needed unless plan
    steps: int = 2000  # steps of the optimizer; more than a run has taken: it goes on
    global_batch: int = 128  # sequences of the data in a step, over all ranks
    micro_batch: int = 1  # sequences in a forward of one rank: memory grows with them
    loss_chunk: int = 1024  # positions whose logits exist at once: less takes less memory
    save_every: int = 250  # steps between checkpoints
    keep_last: int = 2  # newest checkpoints that are kept
    keep_every: int = 0  # keep the checkpoints of every so many steps too; 0: of none
    resume: bool = True  # go on with an unfinished run in `out`; false: refuse it
    max_loss_ratio: float = 3.0  # a step's loss to the mean of recent ones: above it the run stops
    validate_every: int = 250  # steps between validations
    validate_sequences: int = 64  # held-out sequences of a validation, at most
    # of the held-out loss of standard tokens over the base model's: more than this is warned of
    max_loss_rise: float = 0.01
    plan: bool = False  # print what would run, with its memory and time, and stop
    plan_ranks: int = 8  # ranks (GPUs) that plan=true assumes
    plan_device: str = "a100_80gb"  # device that plan=true assumes: a name that it lists, or GiB
    plan_utilisation: float | None = None  # share of its peak that plan=true assumes; null: 40 %, and 30 %
    peak_tflops: float | None = None  # of a device, in bfloat16; null: from a table of datasheets
    memory_check: bool = True  # refuse to train what cannot fit into memory
    seed: int = 0  # of the order of the data, the windows and random weights

    def __post_init__(self) -> None:
        if self.lora.gated and self.objective.name != "branch":
            raise ValueError(
                f"lora.gated must be false with objective={self.objective.name}, got true. A gated adapter "
                "acts on the rows of adaptive tokens alone, which only objective=branch computes apart"
            )
        counts = ("steps", "global_batch", "micro_batch", "loss_chunk", "save_every", "keep_last", "plan_ranks")
        for name in (*counts, "validate_every", "validate_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, found {getattr(self, name)}")
        for name in ("keep_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: wanted at least 0, found {getattr(self, name)}")
        for name in ("zero_optimization", "bf16", "fp16", "checkpoint", "data_types"):
            if not isinstance(found := self.deepspeed.get(name, {}), dict):
                raise ValueError(f"deepspeed.{name}: wanted settings below it, found {found}")
        for name in ("bf16", "fp16"):
            enabled = self.deepspeed.get(name, {}).get("enabled", False)
            if not isinstance(enabled, bool):
                raise ValueError(f"deepspeed.{name}.enabled must be true or false, got {enabled}")
        for name in ("optimizer", "scheduler"):
            if name in self.deepspeed:
                raise ValueError(
                    f"deepspeed.{name}: wanted no such setting: optimizer.* says how the weights move"
                )
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"deepspeed.zero_optimization.stage: wanted 0, 1, 2 or 3, found {self.stage}")
        self._check_accumulation()
        self._check_own()
        if not self.max_loss_ratio > 1:
            raise ValueError(f"max_loss_ratio: wanted above 1, found {self.max_loss_ratio}")
        if self.plan_utilisation is not None and not 0 < self.plan_utilisation <= 1:
            raise ValueError(f"plan_utilisation: wanted a share above 0, found {self.plan_utilisation}")

    def _check_own(self) -> None:
        """Raises ValueError for own text that the objective or the size of a step has no place for."""
        if not self.data.own:
            return
        if self.objective.name != "branch":
            raise ValueError(
                f"data.own must be null for objective={self.objective.name}, got {self.data.own}: only branch "
                "takes own text. Use objective=branch"
            )
        if not 0 < (count := self.data.own_sequences(self.global_batch)) < self.global_batch:
            raise ValueError(
                f"data.own_share must give 1 to {self.global_batch - 1} of the {self.global_batch} sequences "
                f"of a step, got {count} by {self.data.own_share}. Change it or global_batch"
            )

    def _check_accumulation(self) -> None:
        """Raises ValueError for a type that DeepSpeed's optimizers cannot add gradients up in."""
        wanted = self.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        if wanted not in (None, "fp32", "bf16"):
            raise ValueError(f"deepspeed.data_types.grad_accum_dtype must be fp32 or bf16, got {wanted}")
        if wanted == "bf16" and not self.bf16:
            raise ValueError(
                "deepspeed.data_types.grad_accum_dtype must be fp32 with deepspeed.bf16.enabled=false, got bf16"
            )
        if wanted == "fp32" and self.bf16 and self.stage < 2:
            # 0.19.8: stage 0 has no such optimizer; that of stage 1 holds all gradients in both types.
            raise ValueError(
                f"deepspeed.data_types.grad_accum_dtype must be bf16 for bfloat16 weights at ZeRO stage "
                f"{self.stage}, got fp32. Use deepspeed=zero2, which takes no more memory"
            )

    @property
    def gradient_bytes(self) -> int:
        """Of each number that gradients of several micro-batches are added up in."""
        wanted = self.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        return 2 if self.bf16 and wanted != "fp32" else 4

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

    def check_steps(self, done: int) -> None:
        """Raises UserError where a run has gone further than `steps`."""
        if done > self.steps:
            raise UserError(
                f"steps={self.steps}: must be at least the {done} steps that out={self.out} has taken. Use "
                "another out=, or more steps"
            )

    def accumulations(self, ranks: int) -> int:
        """Micro-batches per rank and step. Raises UserError when the global batch does not divide."""
        if self.global_batch % (self.micro_batch * ranks):
            raise UserError(
                f"global_batch={self.global_batch}: wanted a multiple of micro_batch x ranks = "
                f"{self.micro_batch} x {ranks}"
            )
        return self.global_batch // (self.micro_batch * ranks)
