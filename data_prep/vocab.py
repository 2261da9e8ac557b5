"""Look up the ids of a tokenizer's control pieces, and copy its files.

The ids are recorded in the manifest. Pieces that are not set are read from the tokenizer's
files; conf.text.infilling lists the infilling pieces of the families of models.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conf.errors import UserError, as_user_error
from conf.runs.files import check_regular, read_json
from conf.text.encoding import BYTE, SPACE, prefix_ids
from conf.text.infilling import (
    CONTROL,
    ORDERS,
    Infilling,
    family_of,
    find_infilling,
    piece_id,
)
from data_prep.config import VocabConfig

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)
# Transformers' files of chat templates with names.
NAMED = "additional_chat_templates/*.jinja"
TOKENIZER = "tokenizer"  # subfolder of a data folder with the tokenizer's files
INFILLING = ("pre", "suf", "mid", "eot")  # names of the infilling pieces
SENTINELS = ("bos", "eos", *INFILLING)
EOS = "</s>"  # default if a folder has no tokenizer_config.json
SPARE_ROWS = 7  # largest number of unused rows that become adaptive tokens by default
# A chat model's EOS may end a turn; then another piece ended documents in its pretraining.
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|EOT|>"),
    *("<end_of_turn>", "<|eot|>"),
)
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")


@dataclass(frozen=True)
class Vocab:
    """The ids of the control pieces.

    `bos` is None if documents begin without BOS. `pre`, `suf`, `mid` and `eot` are None if the
    tokenizer lacks these pieces. `orders` are the family's infilling orders. `ends` are all ids
    that end a text of the model; `eos` ends a document.
    """

    size: int
    bos: int | None
    eos: int
    pre: int | None
    suf: int | None
    mid: int | None
    eot: int | None
    adaptive: tuple[int, ...]
    orders: tuple[str, ...] = ORDERS
    ends: tuple[int, ...] = ()

    @cached_property
    def fim(self) -> Infilling | None:
        """The infilling format; None if the tokenizer lacks the pieces."""
        if self.pre is None or self.suf is None:
            return None
        return Infilling(self.pre, self.suf, self.mid, self.eot, self.orders)

    @property
    def infilling(self) -> bool:
        """True if documents can be laid out for infilling."""
        return self.fim is not None

    @cached_property
    def sentinels(self) -> frozenset[int]:
        """The ids of `bos`, `eos` and the infilling pieces, which no text may produce."""
        return frozenset(getattr(self, name) for name in SENTINELS) - {None}

    @cached_property
    def control(self) -> frozenset[int]:
        """The ids that no text may produce: sentinels, ends and adaptive ids."""
        return self.sentinels.union(self.ends, self.adaptive)

    @cached_property
    def text_size(self) -> int:
        """One more than the largest token id that is not adaptive."""
        return max(set(range(self.size)).difference(self.adaptive)) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the entry for the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocab":
        """Read an entry of a manifest. Entries of earlier versions lack `orders` and `ends`."""
        lists: dict[str, Any] = {
            name: tuple(value[name])
            for name in ("adaptive", "orders", "ends")
            if name in value
        }
        return cls(**{**value, **lists})


def tokenizer_file(folder: str | Path) -> Path:
    """Return the path of a folder's tokenizer.json. Raises UserError if it is missing."""
    if not Path(folder).is_dir():
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer.json, got no such folder. "
            "Check the path"
        )
    check_regular(Path(folder), "tokenizer")
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer.json. Convert another "
            f"kind of tokenizer by AutoTokenizer.from_pretrained('{folder}')"
            ".save_pretrained(DIR) of Transformers"
        )
    return path


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder. Raises UserError if it is missing or damaged."""
    path = tokenizer_file(folder)
    with as_user_error(f"{path} must be a file of the tokenizers library, got"):
        return Tokenizer.from_file(str(path))


def find_vocab(
    tokenizer: Tokenizer, config: VocabConfig, *, model: str | None = None
) -> Vocab:
    """Look up the control pieces in the settings, and the rest in the files of the folder `model`.

    Infilling pieces without an embedding row are left out, since CodeLlama-34B's tokenizer has
    pieces that its model lacks. Adaptive ids may be new rows after the last one, which training
    adds. Raises UserError for pieces in the settings that the tokenizer lacks, and for ids that
    texts produce.
    """
    tokenizer_config = _read_optional(model, "tokenizer_config.json")
    rows = (
        config.rows
        or _read_optional(model, "config.json").get("vocab_size")
        or tokenizer.get_vocab_size(with_added_tokens=True)
    )
    given = {
        name: _given_piece(tokenizer, name, piece, rows)
        for name in SENTINELS
        if (piece := getattr(config, name)) is not None
    }
    ends = end_ids(tokenizer, model, rows)
    bos = _opening_id(prefix_ids(tokenizer, tokenizer_config), tokenizer, given)
    eos = given.get("eos", _document_end(tokenizer, ends, rows))
    if eos is None:
        raise UserError(
            "vocab.eos must be set, since the tokenizer's files name no EOS. Set "
            "vocab.eos=PIECE"
        )
    infilling = find_infilling(tokenizer, rows)
    if "pre" in given:
        infilling = Infilling(
            given["pre"], given["suf"], given["mid"], given.get("eot")
        )
    control = {
        "bos": given.get("bos", bos),
        "eos": eos,
        **{name: getattr(infilling, name, None) for name in INFILLING},
    }
    adaptive = _adaptive_ids(tokenizer, config, rows, {*control.values(), *ends})
    return Vocab(
        size=max(rows, max(adaptive) + 1),
        adaptive=adaptive,
        orders=infilling.orders if infilling else ORDERS,
        ends=ends,
        **control,  # type: ignore[arg-type]
    )


def _opening_id(
    opening: Sequence[int], tokenizer: Tokenizer, given: Mapping[str, int]
) -> int | None:
    """Return the id that the tokenizer puts before a text. Raises UserError for several without vocab.bos.

    GLM-4's tokenizer puts two ids before a text, but documents begin with one, in an export too.
    """
    if len(opening) > 1 and "bos" not in given:
        pieces = [str(tokenizer.id_to_token(id)) for id in opening]
        raise UserError(
            f"tokenizer must put at most one piece before a text, got {' and '.join(pieces)}. "
            f"Choose the piece that documents begin with, such as vocab.bos={pieces[-1]}"
        )
    return next(iter(opening), None)


def end_ids(tokenizer: Tokenizer, model: str | None, rows: int) -> tuple[int, ...]:
    """Return the ids that end a model's texts according to its files, EOS first."""
    ids: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        value = _read_optional(model, name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    eos = _read_optional(model, "tokenizer_config.json").get("eos_token")
    if eos is None and ids == [None, None]:
        eos = EOS
    if eos is not None:
        ids.append(
            tokenizer.token_to_id(eos if isinstance(eos, str) else eos["content"])
        )
    valid = (id for id in ids if isinstance(id, int) and 0 <= id < rows)
    return tuple(dict.fromkeys(valid))


def _document_end(tokenizer: Tokenizer, ends: Collection[int], rows: int) -> int | None:
    """Return the id that ends a document: the model's EOS, unless it ends a chat's turn."""
    eos = next(iter(ends), None)
    if eos is None or tokenizer.id_to_token(eos) not in TURN_ENDS:
        return eos
    candidates = (piece_id(tokenizer, piece, rows) for piece in DOCUMENT_ENDS)
    return next((id for id in candidates if id is not None), eos)


def _read_optional(model: str | None, name: str) -> dict[str, Any]:
    """Return a JSON file of the model's folder; {} if it is missing."""
    path = Path(model or "") / name
    return read_json(path, "a model's JSON") if model and path.is_file() else {}


def _given_piece(tokenizer: Tokenizer, name: str, piece: str, rows: int) -> int:
    """Return the id of a piece in the settings.

    Raises UserError if the tokenizer or the model lacks the piece, or if texts produce it.
    """
    id = piece_id(tokenizer, piece, rows)
    if id is None:
        raise UserError(
            f"vocab.{name}={piece} must be a piece of the tokenizer with an id below the "
            f"model's {rows} rows. Check vocab and tokenizer, or use vocab=auto"
        )
    if produced_by_text(tokenizer, id):
        raise UserError(
            f"vocab.{name}={piece} must be a control piece, got an ordinary piece (id {id}) "
            "that texts produce. Check vocab and tokenizer, or use vocab=auto"
        )
    return id


def produced_by_text(tokenizer: Tokenizer, id: int) -> bool:
    """Return whether a text that spells no control piece can be encoded to this id.

    If any text produces a piece, then the piece's own characters produce it. A single non-ASCII
    character is not produced if the tokenizer has pieces for its bytes, since conf.text.encoding then
    encodes the character as bytes.
    """
    piece = tokenizer.id_to_token(id)
    added = tokenizer.get_added_tokens_decoder().get(id)
    if piece is None or piece in CONTROL or (added and added.special):
        return False
    if added:  # Gemma adds runs of newlines, DeepSeek-Coder control pieces
        return all(char.isalnum() or char.isspace() for char in piece)
    if BYTE.fullmatch(piece):
        return True
    if len(piece) == 1 and not piece.isascii() and piece != SPACE:
        spelled = (f"<0x{byte:02X}>" for byte in piece.encode())
        if all(tokenizer.token_to_id(byte) is not None for byte in spelled):
            return False
    return [token.id for token in tokenizer.model.tokenize(piece)] == [id]


def _adaptive_ids(
    tokenizer: Tokenizer,
    config: VocabConfig,
    rows: int,
    control: Collection[int | None],
) -> tuple[int, ...]:
    """Return the adaptive ids. Raises UserError for unsuitable ids in the settings."""
    if not config.adaptive:
        family = family_of(tokenizer, rows)
        ids = [
            piece_id(tokenizer, p, rows) for p in (family.adaptive if family else ())
        ]
        if ids and None not in ids:
            return tuple(ids)  # type: ignore[arg-type]
        spare = [id for id in range(rows) if tokenizer.id_to_token(id) is None]
        return tuple(spare[:SPARE_ROWS]) or (rows,)
    adaptive = [
        tokenizer.token_to_id(piece) if isinstance(piece, str) else piece
        for piece in config.adaptive
    ]
    cure = f"Use vocab.adaptive=[{rows}], a new row that training adds, or vocab=auto"
    beyond = sorted(id for id in adaptive if id is not None and id >= rows)
    if len({*adaptive, *control, None}) < len(adaptive) + len(
        {*control, None}
    ) or beyond != list(range(rows, rows + len(beyond))):
        raise UserError(
            "vocab.adaptive must be different pieces or ids of the tokenizer, without "
            f"control pieces, below the model's {rows} embedding rows or the next ids, got "
            f"{config.adaptive}. {cure}"
        )
    for id in adaptive:
        if id is not None and id < rows and produced_by_text(tokenizer, id):
            raise UserError(
                "vocab.adaptive must be pieces or ids that no text produces, got the "
                f"ordinary piece {tokenizer.id_to_token(id)!r} (id {id}). {cure}"
            )
    return tuple(adaptive)  # type: ignore[arg-type]


def tokenizer_files(folder: str | Path) -> list[str]:
    """Return the names of a tokenizer's files that exist in a folder, relative to it."""
    place = Path(folder)
    named = sorted(str(path.relative_to(place)) for path in place.glob(NAMED))
    return [name for name in (*FILES, *named) if (place / name).is_file()]


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy the tokenizer's files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in tokenizer_files(source):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / name, folder / name)
