"""The tokenizer's files, and the ids of its control pieces, which the manifest has."""

import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conf import UserError
from conf.errors import Refusing
from conf.files import check_regular, read_json
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
SENTINELS = ("bos", "eos", *INFILLING)
EOS = "</s>"  # where a folder has no tokenizer_config.json
SPARE_ROWS = 7  # adaptive ids at most, where none are given


@dataclass(frozen=True)
class Vocab:
    """Ids of the control pieces.

    `bos` is None where nothing opens a document; the infilling ids are None where a
    tokenizer has none.
    """

    size: int
    bos: int | None
    eos: int
    pre: int | None
    suf: int | None
    mid: int | None
    eot: int | None
    adaptive: tuple[int, ...]

    @property
    def infilling(self) -> bool:
        """True if documents can be laid out for infilling."""
        return None not in (getattr(self, name) for name in INFILLING)

    @cached_property
    def sentinels(self) -> frozenset[int]:
        """Ids that begin, end and divide texts."""
        return frozenset(getattr(self, name) for name in SENTINELS) - {None}

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids that no text may produce: sentinels and adaptive ids."""
        return self.sentinels.union(self.adaptive)

    @cached_property
    def text_size(self) -> int:
        """The number of ids up to the last that is not adaptive."""
        return max(set(range(self.size)).difference(self.adaptive)) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary's entry in the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocab":
        """Read a manifest's entry."""
        return cls(**{**value, "adaptive": tuple(value["adaptive"])})


def tokenizer_file(folder: str | Path) -> Path:
    """Return the tokenizer.json of a folder. Raises UserError where there is none."""
    check_regular(Path(folder), "tokenizer")
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer.json, got none. Convert "
            f"another kind by AutoTokenizer.from_pretrained('{folder}')"
            ".save_pretrained(DIR) of Transformers"
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
    """Look up the control pieces, those that are not given in the files of `model`.

    Infilling pieces without a row are left out: the files of CodeLlama-34B list some that
    its model lacks. Adaptive ids may be the next rows, which training adds. Raises
    UserError for missing pieces.
    """
    described = _described(model, "config.json")
    own = _described(model, "tokenizer_config.json")
    rows = (
        config.rows
        or described.get("vocab_size")
        or tokenizer.get_vocab_size(with_added_tokens=True)
    )
    pieces = {name: getattr(config, name) for name in SENTINELS}
    ids = {
        name: tokenizer.token_to_id(piece) if piece else None
        for name, piece in pieces.items()
    }
    if config.bos is None:
        ids["bos"] = next(iter(tokenizer.encode("").ids), None)
        if ids["bos"] is None and own.get("add_bos_token") and own.get("bos_token"):
            ids["bos"] = _id_of(tokenizer, own["bos_token"])
    if config.eos is None:
        id = _id_of(tokenizer, own.get("eos_token") or EOS)
        expected = described.get("eos_token_id")
        expected = id if expected is None else expected
        ids["eos"] = expected[0] if isinstance(expected, list) else expected
    for name in ("bos", "eos"):
        if ids[name] is None and (name == "eos" or pieces[name]):
            raise UserError(
                f"vocab.{name}={pieces[name]} must be a piece of the tokenizer, got "
                "another. Check vocab and tokenizer"
            )
    ids = {
        name: None if name in INFILLING and id is not None and id >= rows else id
        for name, id in ids.items()
    }
    adaptive = _adaptive_ids(tokenizer, config, rows, frozenset(ids.values()))
    size = max(rows, max(adaptive) + 1)
    return Vocab(size=size, adaptive=adaptive, **ids)  # type: ignore[arg-type]


def _described(model: str | None, name: str) -> dict[str, Any]:
    """Return a JSON file of the model's folder; nothing where there is none."""
    path = Path(model or "") / name
    return read_json(path, "a model's JSON") if model and path.is_file() else {}


def _id_of(tokenizer: Tokenizer, token: str | dict[str, Any]) -> int | None:
    """Return the id of a token as tokenizer_config.json has it."""
    return tokenizer.token_to_id(token if isinstance(token, str) else token["content"])


def _adaptive_ids(
    tokenizer: Tokenizer,
    config: VocabConfig,
    rows: int,
    control: Collection[int | None],
) -> tuple[int, ...]:
    """Return the adaptive ids. Raises UserError for ids that cannot serve."""
    if not config.adaptive:
        spare = [id for id in range(rows) if tokenizer.id_to_token(id) is None]
        return tuple(spare[:SPARE_ROWS]) or (rows,)
    adaptive = [
        tokenizer.token_to_id(piece) if isinstance(piece, str) else piece
        for piece in config.adaptive
    ]
    beyond = sorted(id for id in adaptive if id is not None and id >= rows)
    if len({*adaptive, *control, None}) < len(adaptive) + len(
        {*control, None}
    ) or beyond != list(range(rows, rows + len(beyond))):
        raise UserError(
            "vocab.adaptive must be pieces or ids of the tokenizer, none of a control "
            f"piece, below the model's {rows} embedding rows or the next from there, got "
            f"{config.adaptive}. Use vocab.adaptive=[{rows}], a row that training adds"
        )
    return tuple(adaptive)  # type: ignore[arg-type]


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer's files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path = Path(source) / name
        if path.is_file():
            shutil.copyfile(path, folder / name)
