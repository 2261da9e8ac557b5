"""The settings of `python -m train`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.runs.tracker import TrackerConfig
from conf.settings.schema import check_settings, setting
from train.deepspeed_settings import normalize

# Files and folders in a training folder, beside manifest.json, which is written last.
RUN = "run.json"  # settings and inputs of the run, written before its first step
DESCRIBED = "model"  # the architecture and the tokenizer, for an export
CHECKPOINTS = "checkpoints"  # see train/checkpoint.py
LOG = "log.jsonl"  # a line for every step
TEXTS = "texts.jsonl"  # held-out texts of every validation, with their accepted drafts
PLANNED = "planned.json"  # the steps that minutes= planned
DIAGNOSTICS = "diagnostics.json"  # of the step whose loss diverged
# Masks; the other ones are ids of existing tokens.
ADAPTIVE = "adaptive"
NOISE = "noise"


def _require(valid: bool, sentence: str) -> None:
    """Raise ValueError with the sentence unless the settings are valid."""
    if not valid:
        raise ValueError(sentence)


@dataclass
class ShardsConfig:
    """The shards to train on."""

    #: a finished folder of data_prep
    path: str = setting("", path=True)


@dataclass
class TrainDataConfig(ShardsConfig):
    """The shards to train on, and those of the model's own text."""

    #: the model's own text (infer.regenerate), for the drafts of branch alone: a
    #: finished folder of data_prep with the tokenizer and seq_len of data.path
    own: str | None = setting(None, path=True)
    #: share of a step's sequences that are of data.own
    own_share: float = setting(0.25, above=0, below=1)

    def __post_init__(self) -> None:
        check_settings(self, "data")

    def own_sequences(self, global_batch: int) -> int:
        """Return how many sequences of a step are the model's own text."""
        return round(self.own_share * global_batch) if self.own else 0


@dataclass
class ModelConfig:
    """The model to train: a Transformers directory, or random weights of a shape."""

    #: a Transformers directory with weights, or a hub name; needed unless random_init
    path: str | None = setting(None, hub="model")
    #: random weights of `shape`, in place of a directory's
    random_init: bool = False
    #: begin with the adapter and previous-token head of an export (a model directory
    #: or its adapter/), of at most lora.rank
    adapter: str | None = setting(None, hub="model")
    #: of random weights, and of plan: model_type (llama) and fields of its
    #: configuration
    shape: dict[str, Any] = field(default_factory=dict)
    #: attention of Transformers; eager is faster for tiny models on a CPU
    attention: str = setting("sdpa", choices=("sdpa", "eager"))
    #: recompute layers in the backward pass: less memory, more time
    activation_checkpointing: bool = False
    #: torch.compile the layers: slow first steps, then faster
    compile: bool = False

    def __post_init__(self) -> None:
        check_settings(self, "model")

    @property
    def adapter_folder(self) -> Path | None:
        """The folder of the files of `adapter`.

        Raises UserError if there is no adapter.
        """
        if self.adapter is None:
            return None
        for folder in (Path(self.adapter) / "adapter", Path(self.adapter)):
            if (folder / "adapter_config.json").is_file():
                return folder
        raise UserError(
            "model.adapter must be an export with a kept adapter, or its folder "
            f"adapter/, got {self.adapter} without adapter_config.json. Export it with "
            "lora=kept."
        )


@dataclass
class ObjectiveConfig:
    """The training objective; the symbols are those of SDSAT §2.2."""

    #: causal (eq. 7), basic (eq. 8), dual (eq. 9), or branch (eq. 9 in one pass)
    name: str = setting("dual", choices=("causal", "basic", "dual", "branch"))
    #: widest window of adaptive tokens
    L: int = setting(5, least=1)
    #: probability that a position starts a window
    start_rate: float = setting(0.1, above=0, most=1)
    #: weight of the masked term
    w: float = setting(1.0, least=0)
    #: divisor of the masked term: n (tokens, eq. 9) or masked (its positions)
    masked_mean: str = setting("n", choices=("n", "masked"))
    #: kernel of branch's windows: flex (CUDA), dense, or auto: flex where it can run
    attention: str = setting("auto", choices=("auto", "flex", "dense"))
    #: a token of its own for each offset (App. B), in place of one for all
    diverse: bool = False
    #: tokens in a window's rows: adaptive (with embeddings of their own; as null), noise
    #: (drawn uniformly from the vocabulary), or the id of an existing token; the last two
    #: add no row and train no embedding of their own
    mask: str | None = None
    #: share of the model's own prediction in a draft's target
    soft: float = setting(0.0, least=0, most=1)
    #: train a head that corrects each draft by the token before it (lora.gated)
    previous_token: bool = False

    def __post_init__(self) -> None:
        # Null, so that runs continue that were begun before there was the setting. An id
        # is taken as a number as well.
        self.mask = None if self.mask in (None, ADAPTIVE) else str(self.mask)
        check_settings(self, "objective")
        _require(
            self.name in ("dual", "branch") or not self.soft,
            f"objective.soft needs objective=dual or branch, got objective={self.name}",
        )
        _require(
            self.mask in (None, NOISE) or self.mask.isdecimal(),
            f"objective.mask must be adaptive, noise or a token's id, got {self.mask}",
        )
        _require(
            self.mask is None or not self.diverse,
            f"objective.diverse needs objective.mask=adaptive, got {self.mask}",
        )

    @property
    def mask_id(self) -> int | None:
        """The existing token in a window's rows; None if there are other ones."""
        return int(self.mask) if self.mask and self.mask.isdecimal() else None

    @property
    def described_mask(self) -> str | int | None:
        """The mask in a training's manifest and in adaptive.json; None for causal."""
        if self.name == "causal":
            return None
        return (self.mask or ADAPTIVE) if self.mask_id is None else self.mask_id

    def adaptive_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return those of a vocabulary's adaptive ids that the objective trains.

        Raises ValueError for more offsets than diverse ids.
        """
        if self.name == "causal" or self.mask:
            return ()
        if not self.diverse:
            return tuple(ids[:1])
        _require(
            len(ids) >= self.L,
            f"objective.L must be at most the {len(ids)} diverse ids, got {self.L}",
        )
        return tuple(ids[: self.L])


@dataclass
class LoraSettings:
    """LoRA by peft, in place of training every weight."""

    #: of the low-rank term; 0: no LoRA, every weight is trained
    rank: int = setting(0, least=0)
    #: the low-rank term is scaled by alpha / rank
    alpha: int = setting(16, least=1)
    #: probability of dropping an input of the low-rank term
    dropout: float = setting(0.0, least=0, below=1)
    #: names of linear layers; []: all but the head
    targets: list[str] = setting([])
    #: on adaptive tokens only: the standard path stays the base model's bit for bit
    gated: bool = False

    def __post_init__(self) -> None:
        check_settings(self, "lora")
        _require(
            self.rank > 0 or not self.gated,
            "lora.rank must be at least 1 with lora.gated=true, got 0",
        )


@dataclass
class OptimizerConfig:
    """AdamW or Muon, with linear warm-up and a cosine to a floor."""

    #: adamw; muon: for matrices, and AdamW for the rest (deepspeed=zero0)
    name: str = setting("adamw", choices=("adamw", "muon"))
    #: learning rate after the warm-up
    lr: float = setting(5e-5, least=0)
    #: learning rate in the last step, where the warm-up has ended before
    min_lr: float = setting(1e-5, least=0)
    #: learning rate of the adaptive ids' embeddings beside LoRA, as a multiple of lr
    rows_rate: float = setting(1.0, above=0)
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

    The defaults are SDSAT's (§3.2): AdamW, 2,000 steps, warm-up 400, 5e-5 to 1e-5, 4M
    tokens a step in sequences of 16,384: 128 sequences, each as Y and as M.
    """

    data: TrainDataConfig = field(default_factory=TrainDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    #: DeepSpeed's own settings, or a JSON file of them (deepspeed=FILE.json); batch
    #: sizes and clipping are filled in
    deepspeed: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)
    #: the folder to write; needed unless plan
    out: str = setting("", path=True)
    #: of the weights: bfloat16 (with float32 masters), float32, or auto: by the
    #: device's instructions
    dtype: str = setting("auto", choices=("auto", "bfloat16", "float32"))
    #: optimizer steps; raise it to continue a finished run
    steps: int = setting(2000, least=1)
    #: train for about so many minutes: the number of steps is planned from the first
    #: ones, in place of `steps`, and then fixed
    minutes: float | None = setting(None, above=0)
    #: sequences of the data in a step, over all ranks
    global_batch: int = setting(128, least=1)
    #: sequences in a forward of one rank: memory grows with them
    micro_batch: int = setting(1, least=1)
    #: positions whose logits exist at once: less takes less memory
    loss_chunk: int = setting(1024, least=1)
    #: GiB in which each rank on a CPU keeps what a gated adapter's frozen model
    #: computes of a sequence, for the next time it is trained on; 0: nothing
    trunk_cache: float = setting(1.0, least=0)
    #: steps between checkpoints
    save_every: int = setting(250, least=1)
    #: newest checkpoints to keep
    keep_last: int = setting(2, least=1)
    #: stop if a step's loss is above this multiple of the recent mean
    max_loss_ratio: float = setting(3.0, above=1)
    #: steps between validations
    validate_every: int = setting(250, least=1)
    #: held-out sequences of a validation, at most
    validate_sequences: int = setting(64, least=1)
    #: warn if the held-out standard loss is above the base model's by this share
    max_loss_rise: float = 0.01
    #: print the run's operations, hours and memory, and stop
    plan: bool = False
    #: ranks (GPUs) that plan=true assumes
    plan_ranks: int = setting(8, least=1)
    #: device that plan=true assumes: a name that it lists, or GiB
    plan_device: str = "a100_80gb"
    #: refuse to train where the estimated memory does not fit
    memory_check: bool = True
    #: of the order of the data, the windows and random weights
    seed: int = setting(0, least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        self.deepspeed = normalize(
            self.deepspeed,
            dtype=self.dtype,
            optimizer=self.optimizer.name,
            filled={
                "train_batch_size": ("global_batch", self.global_batch),
                "train_micro_batch_size_per_gpu": ("micro_batch", self.micro_batch),
                "gradient_accumulation_steps": ("global_batch and micro_batch", None),
                "gradient_clipping": ("optimizer.clip", self.optimizer.clip),
            },
        )
        name = self.objective.name
        _require(
            self.lora.gated or not self.objective.previous_token,
            "objective.previous_token needs lora.gated=true, got false",
        )
        _require(
            name == "branch" or not (self.lora.gated or self.data.own),
            f"lora.gated and data.own need objective=branch, got objective={name}",
        )
        _require(
            self.optimizer.name == "adamw" or not self.stage,
            "optimizer.name=muon needs deepspeed=zero0: others cut matrices into pieces, "
            f"got stage {self.stage}",
        )
        _require(
            self.lora.rank > 0 or self.model.adapter is None,
            "model.adapter needs lora.rank of at least the adapter's rank, got 0",
        )
        own = self.data.own_sequences(self.global_batch)
        _require(
            not self.data.own or 0 < own < self.global_batch,
            "data.own_share must give a step sequences of both kinds, "
            f"got {own} of {self.global_batch}",
        )

    @property
    def bf16(self) -> bool:
        """Whether the weights are bfloat16; auto counts as bfloat16 until a run
        chooses.
        """
        return self.dtype != "float32"

    @property
    def zero(self) -> dict[str, Any]:
        """The engine's settings of ZeRO."""
        zero: dict[str, Any] = self.deepspeed.get("zero_optimization", {})
        return zero

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.zero.get("stage", 0))

    def check_steps(self, done: int) -> None:
        """Raise UserError if a run has taken more than `steps` steps."""
        if self.minutes is None and done > self.steps:
            raise UserError(
                f"steps must be at least the {done} steps that out={self.out} has taken, "
                f"got {self.steps}. Use another out=, or more steps."
            )

    def accumulations(self, ranks: int) -> int:
        """Return the micro-batches per rank and step.

        Raises UserError unless they make the global batch.
        """
        if self.global_batch % (self.micro_batch * ranks):
            raise UserError(
                f"global_batch must be a multiple of micro_batch={self.micro_batch} x "
                f"{ranks} ranks, got {self.global_batch}."
            )
        return self.global_batch // (self.micro_batch * ranks)
