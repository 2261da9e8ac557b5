"""The settings of `python -m train`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conf import UserError
from conf.dtype import AUTO
from conf.schema import MODEL, PATH, check_settings, setting
from conf.tracker import TrackerConfig

# Files and folders in a training folder, beside manifest.json, which is written last.
RUN = "run.json"  # what the run was made from, written before its first step
DESCRIBED = "model"  # the architecture and the tokenizer, for an export
CHECKPOINTS = "checkpoints"  # see train/checkpoints.py
LOG = "log.jsonl"  # a line for every step
DIAGNOSTICS = "diagnostics.json"  # of the step whose loss diverged


def _require(valid: bool, name: str, expected: str, value: Any, cure: str = "") -> None:
    """Raise ValueError for a setting that is not valid."""
    if not valid:
        raise ValueError(
            f"{name} must be {expected}, got {value}{'. ' + cure if cure else ''}"
        )


@dataclass
class ShardsConfig:
    """The shards to train on."""

    path: str = field(default="", metadata=PATH)  # a finished folder of data_prep


@dataclass
class TrainDataConfig(ShardsConfig):
    """The shards to train on, and those of the model's own text."""

    # the model's own text (infer.regenerate), for the drafts of branch alone: a finished folder of data_prep
    # with the tokenizer and seq_len of data.path; null: none
    own: str | None = field(default=None, metadata=PATH)
    own_share: float = 0.25  # share of a step's sequences that are of data.own

    def __post_init__(self) -> None:
        share = self.own_share
        _require(
            0 < share < 1,
            "data.own_share",
            "above 0 and below 1",
            share,
            "For no own text leave out data.own",
        )

    def own_sequences(self, global_batch: int) -> int:
        """Return how many sequences of a step are the model's own text."""
        return round(self.own_share * global_batch) if self.own else 0


@dataclass
class ModelConfig:
    """The model to train: a Transformers directory, or random weights of a shape."""

    # a Transformers directory with weights, or a hub name; needed unless random_init
    path: str | None = field(default=None, metadata=MODEL)
    random_init: bool = False  # random weights of `shape`, in place of a directory's
    # of random weights, and of plan: model_type (llama) and fields of its configuration
    shape: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"  # kernel: sdpa, eager or flash_attention_2
    activation_checkpointing: bool = (
        False  # recompute layers in the backward pass: less memory, more time
    )
    compile: bool = False  # torch.compile the layers: slow first steps, then faster

    def __post_init__(self) -> None:
        kinds = ("sdpa", "eager", "flash_attention_2")
        _require(
            self.attention in kinds,
            "model.attention",
            "sdpa, eager or flash_attention_2",
            self.attention,
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
    diverse: bool = (
        False  # a token of its own for each offset (App. B), in place of one for all
    )
    # how adaptive tokens learn: ce (cross-entropy), or lk: for acceptance by the model's own distribution
    draft_loss: str = "ce"
    soft: float = 0.0  # share of the model's own prediction in a masked position's target, with draft_loss=ce
    # of a window's places: uniform, or dynamic (what each place adds to the expected accepted length)
    place_weights: str = "uniform"

    def __post_init__(self) -> None:
        choices = {
            "name": ("causal", "basic", "dual", "branch"),
            "attention": ("auto", "flex", "dense"),
            "draft_loss": ("ce", "lk"),
            "place_weights": ("uniform", "dynamic"),
            "masked_mean": ("n", "masked"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            _require(
                value in known,
                f"objective.{name}",
                f"{', '.join(known[:-1])} or {known[-1]}",
                value,
            )
        _require(self.L >= 1, "objective.L", "at least 1", self.L)
        _require(self.w >= 0, "objective.w", "at least 0", self.w)
        _require(
            0 < self.start_rate <= 1,
            "objective.start_rate",
            "a probability above 0",
            self.start_rate,
        )
        for name in ("wide_share", "soft"):
            share = getattr(self, name)
            _require(0 <= share <= 1, f"objective.{name}", "a share from 0 to 1", share)
        self._check_draft_loss()
        if self.wide_share:
            self._check_wide()

    def _check_draft_loss(self) -> None:
        if self.name not in ("dual", "branch"):
            cure = "Use objective=dual or branch: drafts learn from the model's prediction on a clean sequence"
            _require(
                not self.soft,
                "objective.soft",
                f"0 with objective={self.name}",
                self.soft,
                cure,
            )
            expected = f"ce with objective={self.name}"
            _require(
                self.draft_loss == "ce",
                "objective.draft_loss",
                expected,
                self.draft_loss,
                cure,
            )
        if self.draft_loss != "ce":
            expected = f"0 with objective.draft_loss={self.draft_loss}"
            _require(
                not self.soft,
                "objective.soft",
                expected,
                self.soft,
                "Set objective.draft_loss=ce",
            )

    def _check_wide(self) -> None:
        name = "objective.wide_share"
        share = self.wide_share
        cure = "Use objective=branch: only there windows have a set width"
        _require(
            self.name == "branch", name, f"0 for objective={self.name}", share, cure
        )
        cure = "Set objective.diverse=false, or raise objective.L: offsets above L have no id of their own"
        _require(not self.diverse, name, "0 with objective.diverse=true", share, cure)
        cure = "Raise it, or set objective.wide_share=0"
        _require(
            self.L_max > self.L,
            "objective.L_max",
            f"above objective.L={self.L}",
            self.L_max,
            cure,
        )

    def adaptive_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return those of a vocabulary's adaptive ids that the objective trains.

        Raises ValueError for more offsets than diverse ids.
        """
        if self.name == "causal":
            return ()
        if not self.diverse:
            return tuple(ids[:1])
        _require(
            len(ids) >= self.L,
            "objective.L",
            f"at most the {len(ids)} diverse ids",
            self.L,
        )
        return tuple(ids[: self.L])


@dataclass
class LoraSettings:
    """LoRA by peft, in place of training every weight."""

    rank: int = 0  # of the low-rank term; 0: no LoRA, every weight is trained
    alpha: int = 16  # the low-rank term is scaled by alpha / rank
    dropout: float = 0.0  # of the low-rank term's input: a probability
    targets: list[str] = field(
        default_factory=list
    )  # names of linear layers; []: all but the head
    gated: bool = False  # on adaptive rows only: the standard path stays the base model's bit for bit
    adaptive_rows: bool = True  # train the adaptive ids' input embeddings too

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "lora.rank", "at least 0", self.rank)
        _require(self.alpha >= 1, "lora.alpha", "at least 1", self.alpha)
        _require(
            0 <= self.dropout < 1, "lora.dropout", "a probability below 1", self.dropout
        )
        _require(
            self.rank > 0 or not self.gated,
            "lora.rank",
            "at least 1 with lora.gated=true",
            self.rank,
        )


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine to a floor."""

    #: learning rate after the warm-up
    lr: float = setting(5e-5, least=0)
    #: learning rate in the last step, where the warm-up has ended before
    min_lr: float = setting(1e-5, least=0)
    #: steps in which the learning rate rises from 0
    warmup_steps: int = setting(400, least=0)
    #: decay of the mean of gradients
    beta1: float = setting(0.9, least=0, below=1)
    #: decay of the mean of their squares
    beta2: float = setting(0.95, least=0, below=1)
    #: of matrices; norms, biases and embeddings have none
    weight_decay: float = setting(0.1, least=0)
    #: largest norm of the gradient; 0: no clipping
    clip: float = setting(1.0, least=0)

    def __post_init__(self) -> None:
        check_settings(self, "optimizer")


@dataclass
class TrainConfig:
    """torchrun -m train: token shards and a model -> a fine-tuned checkpoint.

    The defaults are SDSAT's (§3.2): AdamW, 2,000 steps, warm-up 400, 5e-5 to 1e-5, 4M tokens a step in
    sequences of 16,384: 128 sequences, each as Y and as M.
    """

    # The shards to train on; needed unless plan.
    data: TrainDataConfig = field(default_factory=TrainDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    # DeepSpeed's own settings, passed on; batch sizes and clipping are filled in
    deepspeed: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)
    out: str = field(
        default="", metadata=PATH
    )  # the folder to write; needed unless plan
    # of the weights: bfloat16 (with float32 masters), float32, or auto: by measurement, as conf/dtype.py says
    dtype: str = "auto"
    steps: int = 2000  # optimizer steps; raise it to continue a finished run
    global_batch: int = 128  # sequences of the data in a step, over all ranks
    micro_batch: int = 1  # sequences in a forward of one rank: memory grows with them
    loss_chunk: int = (
        1024  # positions whose logits exist at once: less takes less memory
    )
    save_every: int = 250  # steps between checkpoints
    keep_last: int = 2  # newest checkpoints to keep
    keep_every: int = 0  # also keep the checkpoint of every so many steps; 0: none
    resume: bool = True  # continue an unfinished run in `out`; false: refuse it
    max_loss_ratio: float = (
        3.0  # stop if a step's loss is above this multiple of the recent mean
    )
    validate_every: int = 250  # steps between validations
    # held-out sequences of a validation, at most; null: up to 64, by a hundredth of the run's time for all
    validate_sequences: int | None = None
    max_loss_rise: float = 0.01  # warn if the held-out standard loss is above the base model's by this share
    plan: bool = False  # print what would run, with its memory and time, and stop
    plan_ranks: int = 8  # ranks (GPUs) that plan=true assumes
    plan_device: str = (
        "a100_80gb"  # device that plan=true assumes: a name that it lists, or GiB
    )
    plan_utilisation: float | None = (
        None  # share of its peak that plan=true assumes; null: 40 %, and 30 %
    )
    peak_tflops: float | None = (
        None  # of a device, in bfloat16; null: from a table of datasheets
    )
    memory_check: bool = True  # refuse to train what cannot fit into memory
    seed: int = 0  # of the order of the data, the windows and random weights

    def __post_init__(self) -> None:
        objective = self.objective.name
        cure = "Use objective=branch, which alone computes the rows of adaptive tokens apart"
        ungated = not self.lora.gated
        _require(
            objective == "branch" or ungated,
            "lora.gated",
            f"false with {objective=!s}",
            True,
            cure,
        )
        counts = (
            "steps",
            "global_batch",
            "micro_batch",
            "loss_chunk",
            "save_every",
            "keep_last",
            "plan_ranks",
        )
        for name in (*counts, "validate_every", "validate_sequences"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "at least 1", value)
        for name in ("keep_every", "seed"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(
            self.max_loss_ratio > 1, "max_loss_ratio", "above 1", self.max_loss_ratio
        )
        share = self.plan_utilisation
        _require(
            share is None or 0 < share <= 1,
            "plan_utilisation",
            "a share above 0 and at most 1",
            share,
        )
        known = (AUTO, "bfloat16", "float32")
        _require(self.dtype in known, "dtype", "auto, bfloat16 or float32", self.dtype)
        self._check_deepspeed()
        if self.data.own:
            cure = "Use objective=branch, which alone takes own text"
            _require(
                objective == "branch",
                "data.own",
                f"null for {objective=!s}",
                self.data.own,
                cure,
            )
            count = self.data.own_sequences(self.global_batch)
            batch = self.global_batch
            expected = f"a share that gives 1 to {batch - 1} of the {batch} sequences of a step"
            value = f"{self.data.own_share}, which gives {count}"
            _require(0 < count < batch, "data.own_share", expected, value)

    def _check_deepspeed(self) -> None:
        """Raise ValueError for settings that DeepSpeed does not refuse, or not in time."""
        for name in ("zero_optimization", "bf16", "fp16", "checkpoint", "data_types"):
            value = self.deepspeed.get(name, {})
            _require(
                isinstance(value, dict),
                f"deepspeed.{name}",
                "a group of settings",
                value,
            )
        for name in ("bf16", "fp16"):
            value = self.deepspeed.get(name, {}).get("enabled")
            cure = "Use dtype=bfloat16 or dtype=float32"
            _require(
                value is None, f"deepspeed.{name}.enabled", "left out", value, cure
            )
        for name in ("optimizer", "scheduler"):
            value = self.deepspeed.get(name)
            _require(
                name not in self.deepspeed,
                f"deepspeed.{name}",
                "left out",
                value,
                "Use optimizer.*",
            )
        _require(
            self.stage in range(4),
            "deepspeed.zero_optimization.stage",
            "0, 1, 2 or 3",
            self.stage,
        )
        name = "deepspeed.data_types.grad_accum_dtype"
        kind = self.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        _require(kind in (None, "fp32", "bf16"), name, "fp32 or bf16", kind)
        _require(self.bf16 or kind != "bf16", name, "fp32 with dtype=float32", kind)
        # DeepSpeed 0.19.8: stage 0 has no such optimizer; that of stage 1 holds all gradients in both types.
        expected = f"bf16 for bfloat16 weights at ZeRO stage {self.stage}"
        cure = "Use deepspeed=zero2, which takes no more memory"
        _require(
            kind != "fp32" or not self.bf16 or self.stage >= 2,
            name,
            expected,
            kind,
            cure,
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a number that the gradients of several micro-batches are summed in."""
        kind = self.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        return 2 if self.bf16 and kind != "fp32" else 4

    @property
    def bf16(self) -> bool:
        """Whether the weights are bfloat16, as auto is taken to be until it is settled; float32 otherwise."""
        return self.dtype != "float32"

    @property
    def zero(self) -> dict[str, Any]:
        """The engine's settings of ZeRO."""
        return self.deepspeed.get("zero_optimization", {})

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return self.zero.get("stage", 0)

    def check_steps(self, done: int) -> None:
        """Raise UserError if a run has gone further than `steps`."""
        if done > self.steps:
            raise UserError(
                f"steps={self.steps} must be at least the {done} steps that out={self.out} has taken. Use "
                "another out=, or more steps"
            )

    def accumulations(self, ranks: int) -> int:
        """Return the micro-batches per rank and step. Raise UserError unless they make the global batch."""
        per_round = self.micro_batch * ranks
        if self.global_batch % per_round:
            raise UserError(
                f"global_batch must be a multiple of micro_batch x ranks = {self.micro_batch} x {ranks}, got "
                f"{self.global_batch}"
            )
        return self.global_batch // per_round
