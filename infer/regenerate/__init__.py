"""python -m infer.regenerate: documents of training continued by the model, to train drafts on its own text.

run.py       from the settings to shards of JSON lines: units of documents, each kept as soon as it is done
"""

from dataclasses import dataclass, field

from conf.schema import MODEL, PATH
from infer.config import BY_DRAFT_MODEL, DecodeConfig, check_at_least, check_dtype


@dataclass
class DocumentsConfig:
    """The documents to continue."""

    path: str = field(
        metadata=PATH
    )  # a finished folder of data_prep, with the model's tokenizer


@dataclass
class RegenerateConfig:
    """python -m infer.regenerate: documents of the training data, continued by the model.

    The text of a document depends on decode.seed and its id, and not on the documents beside it.
    """

    model: str = field(
        metadata=MODEL
    )  # a Transformers directory or hub name, with or without adaptive tokens
    data: DocumentsConfig
    out: str = field(metadata=PATH)  # the folder to write
    # How documents are continued: by at most decode.max_new_tokens tokens. decode.seed draws the documents,
    # their prefixes and the noise of sampling.
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    documents: int | None = (
        None  # how many to continue, drawn by decode.seed; null: all
    )
    prefix_min: int = 16  # shortest prefix of a document, in tokens
    prefix_max: int = (
        64  # longest prefix of a document, in tokens; each length is as likely
    )
    batch: int = 64  # documents decoded side by side, and kept together
    dtype: str = "auto"  # of the weights: float32, bfloat16, float16, or auto: by measurement (conf/dtype.py)
    threads: int | None = None  # of the CPU; null: the library's choice

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_at_least(
            self, {"documents": 1, "prefix_min": 1, "batch": 1, "threads": 1}
        )
        if self.prefix_max < self.prefix_min:
            raise ValueError(
                f"prefix_max must be at least prefix_min={self.prefix_min}, got {self.prefix_max}. Raise it"
            )
        if self.decode.method in BY_DRAFT_MODEL:
            raise ValueError(
                f"decode.method must be plain, prompt_lookup, ngrams or sdsat, got {self.decode.method}. "
                "No draft model is loaded: use decode=plain"
            )
        if self.decode.stop:
            raise ValueError(
                f"decode.stop must be empty, got {self.decode.stop}. A document ends with EOS alone"
            )
