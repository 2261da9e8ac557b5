"""The tokenizer's files and the ids of its control pieces, which travel in the manifest as Vocab."""

import json
import shutil
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from conf import UserError
from conf.errors import Refusing
from conf.files import read_json
from data_prep.config import VocabConfig

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)
TOKENIZER = "tokenizer"  # the folder of them beside the shards
INFILLING = ("pre", "suf", "mid", "eot")  # the control pieces of infilling


@dataclass(frozen=True)
class Vocab:
    """Ids of the control pieces. The infilling ids are None where a tokenizer has none."""

    size: int
    bos: int
    eos: int
    pre: int | None
    suf: int | None
    mid: int | None
    eot: int | None
    adaptive: tuple[int, ...]

    @property
    def infilling(self) -> bool:
        """Whether documents can be laid out for infilling."""
        return None not in (getattr(self, name) for name in INFILLING)

    @cached_property
    def sentinels(self) -> frozenset[int]:
        """Ids that open, end and divide texts."""
        ids = (self.bos, self.eos, self.pre, self.suf, self.mid, self.eot)
        return frozenset(id for id in ids if id is not None)

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids that no text may produce: sentinels and adaptive ones."""
        return self.sentinels.union(self.adaptive)

    @property
    def text_size(self) -> int:
        """Ids up to the last one that is not adaptive."""
        return max(set(range(self.size)).difference(self.adaptive)) + 1

    def to_json(self) -> dict[str, Any]:
        """Return it as it stands in the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocab":
        """Read it from the manifest."""
        return cls(**{**value, "adaptive": tuple(value["adaptive"])})


def tokenizer_file(folder: str | Path) -> Path:
    """Return the tokenizer.json of a folder. Raises UserError where there is none."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer.json, got none. Convert another kind by "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained(DIR) of Transformers"
        )
    return path


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder. Raises UserError where there is none."""
    path = tokenizer_file(folder)
    with Refusing(f"{path} must be a tokenizers file, got"):
        return Tokenizer.from_file(str(path))


def find_vocab(
    tokenizer: Tokenizer, config: VocabConfig, *, model: str | None = None
) -> Vocab:
    """Look up the control pieces; `model` is the folder of a config.json that says the rows, BOS and EOS.

    Infilling pieces without a row are none: the files of CodeLlama-34B list some that its model lacks. Adaptive
    ids may be the next rows, which training adds. Raises UserError for a missing BOS, EOS or adaptive token,
    and for a model with another BOS or EOS.
    """
    described = _read_model(model) if model else {}
    rows = (
        config.rows
        or described.get("vocab_size")
        or tokenizer.get_vocab_size(with_added_tokens=True)
    )
    ids = {
        name: tokenizer.token_to_id(getattr(config, name)) for name in ("bos", "eos")
    }
    for name, id in ids.items():
        if id is None:
            raise UserError(
                f"vocab.{name} must be a piece of the tokenizer, got {getattr(config, name)}"
            )
    infilling = {
        name: tokenizer.token_to_id(getattr(config, name)) for name in INFILLING
    }
    infilling = {
        name: id if id is not None and id < rows else None
        for name, id in infilling.items()
    }
    adaptive = _adaptive_ids(
        tokenizer, config, rows, {*ids.values(), *infilling.values()}
    )
    for name, id in ids.items():
        theirs = described.get(f"{name}_token_id")
        if theirs is not None and id not in (
            theirs if isinstance(theirs, list) else [theirs]
        ):
            raise UserError(
                f"vocab.{name} must have the {name.upper()} id {theirs} of {model}/config.json, got {id}. "
                "Check vocab and tokenizer"
            )
    size = max(rows, *(id + 1 for id in adaptive))
    return Vocab(size=size, adaptive=adaptive, **ids, **infilling)  # type: ignore[arg-type]


def _adaptive_ids(
    tokenizer: Tokenizer, config: VocabConfig, rows: int, others: Set[int | None]
) -> tuple[int, ...]:
    adaptive: list[int] = []
    for piece in config.adaptive:
        id = tokenizer.token_to_id(piece) if isinstance(piece, str) else piece
        if not isinstance(id, int) or id < 0:
            raise UserError(
                f"vocab.adaptive must be pieces or ids of the tokenizer, got {piece!r}"
            )
        adaptive.append(id)
    if (
        not adaptive
        or len(set(adaptive)) < len(adaptive)
        or not others.isdisjoint(adaptive)
    ):
        raise UserError(
            "vocab.adaptive must have at least one id, each once and none of a control piece, got "
            f"{config.adaptive}"
        )
    beyond = sorted(id for id in adaptive if id >= rows)
    if beyond != list(range(rows, rows + len(beyond))):
        raise UserError(
            f"vocab.adaptive must be ids below the model's {rows} embedding rows, or the next from {rows} on, "
            f"got {', '.join(map(str, beyond))}. Use vocab.adaptive=[{rows}], a row that training adds"
        )
    return tuple(adaptive)


def _read_model(folder: str) -> dict[str, Any]:
    """Return the config.json of the model beside a tokenizer; empty where there is none."""
    path = Path(folder) / "config.json"
    model = read_json(path, "a model's JSON") if path.is_file() else {}
    rows = model.get("vocab_size")
    if rows is not None and (type(rows) is not int or not 0 < rows < 2**31):
        raise UserError(
            f"{path}: vocab_size must be a number of embedding rows, got {rows!r}"
        )
    return model


def train_bpe(texts: Iterable[str], config: VocabConfig) -> Tokenizer:
    """Train a byte-level BPE of `train_size` ids with CodeLlama's control pieces, for the demo."""
    assert config.train_size is not None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [config.bos, config.eos, config.pre, config.suf, config.mid, config.eot]
    trainer = trainers.BpeTrainer(
        vocab_size=config.train_size,
        special_tokens=control
        + [name for name in config.adaptive if isinstance(name, str)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(config.bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{config.bos} $A", special_tokens=[(config.bos, bos)]
    )
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, config: VocabConfig, source: str | None, folder: Path
) -> None:
    """Put the tokenizer beside the shards, as Transformers reads it: copied, or written when it was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        for name in FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
        return
    # Not by its own `save`, whose error for a full disk is no OSError.
    (folder / "tokenizer.json").write_text(
        tokenizer.to_str(pretty=True), encoding="utf-8"
    )
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": config.bos,
        "eos_token": config.eos,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(described, indent=1) + "\n", encoding="utf-8"
    )
