"""The tokenizer's files, and the ids of its control pieces, which the manifest has.

What is not given is found in the files: conf.text.infilling knows the families of models.
"""

import shutil
from collections.abc import Collection
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
TOKENIZER = "tokenizer"  # the folder of them beside the shards
INFILLING = ("pre", "suf", "mid", "eot")  # the control pieces of infilling
SENTINELS = ("bos", "eos", *INFILLING)
EOS = "</s>"  # where a folder has no tokenizer_config.json
SPARE_ROWS = 7  # adaptive ids at most, where none are given
# The EOS of a model that chats ends a turn; in its training another piece ended documents.
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|EOT|>"),
    *("<end_of_turn>", "<|eot|>"),
)
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")


@dataclass(frozen=True)
class Vocab:
    """Ids of the control pieces.

    `bos` is None where nothing opens a document; the infilling ids are None where a
    tokenizer has none. `orders` are those of an infilling's parts. `ends` are all ids that
    end the model's texts; `eos` ends a document.
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
        """How documents are laid out for infilling; None without the pieces."""
        if self.pre is None or self.suf is None:
            return None
        return Infilling(self.pre, self.suf, self.mid, self.eot, self.orders)

    @property
    def infilling(self) -> bool:
        """True if documents can be laid out for infilling."""
        return self.fim is not None

    @cached_property
    def sentinels(self) -> frozenset[int]:
        """Ids that begin, end and divide texts."""
        return frozenset(getattr(self, name) for name in SENTINELS) - {None}

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids that no text may produce: sentinels, ends and adaptive ids."""
        return self.sentinels.union(self.ends, self.adaptive)

    @cached_property
    def text_size(self) -> int:
        """The number of ids up to the last that is not adaptive."""
        return max(set(range(self.size)).difference(self.adaptive)) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary's entry in the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocab":
        """Read a manifest's entry, also one from before there were orders and ends."""
        lists: dict[str, Any] = {
            name: tuple(value[name])
            for name in ("adaptive", "orders", "ends")
            if name in value
        }
        return cls(**{**value, **lists})


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
    with as_user_error(f"{path} must be a tokenizers file, got"):
        return Tokenizer.from_file(str(path))


def find_vocab(
    tokenizer: Tokenizer, config: VocabConfig, *, model: str | None = None
) -> Vocab:
    """Look up the control pieces, those that are not given in the files of `model`.

    Infilling pieces without a row are left out: the files of CodeLlama-34B list some that
    its model lacks. Adaptive ids may be the next rows, which training adds. Raises
    UserError for given pieces that are missing, and for given ids that texts produce.
    """
    own = _described(model, "tokenizer_config.json")
    rows = (
        config.rows
        or _described(model, "config.json").get("vocab_size")
        or tokenizer.get_vocab_size(with_added_tokens=True)
    )
    given = {
        name: _given_piece(tokenizer, name, piece, rows)
        for name in SENTINELS
        if (piece := getattr(config, name)) is not None
    }
    ends = end_ids(tokenizer, model, rows)
    bos, *_ = [*prefix_ids(tokenizer, own), None]
    eos = given.get("eos", _document_end(tokenizer, ends, rows))
    if eos is None:
        raise UserError(
            "vocab.eos must be a piece of the tokenizer, got none from the model's files. "
            "Give vocab.eos=PIECE"
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


def end_ids(tokenizer: Tokenizer, model: str | None, rows: int) -> tuple[int, ...]:
    """Return the ids that end a model's texts, by the files of its folder, EOS first."""
    ids: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        value = _described(model, name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    eos = _described(model, "tokenizer_config.json").get("eos_token")
    if eos is None and ids == [None, None]:
        eos = EOS
    if eos is not None:
        ids.append(
            tokenizer.token_to_id(eos if isinstance(eos, str) else eos["content"])
        )
    valid = (id for id in ids if isinstance(id, int) and 0 <= id < rows)
    return tuple(dict.fromkeys(valid))


def _document_end(tokenizer: Tokenizer, ends: Collection[int], rows: int) -> int | None:
    """Return the id that ends a document: the model's EOS, unless that ends a turn."""
    eos = next(iter(ends), None)
    if eos is None or tokenizer.id_to_token(eos) not in TURN_ENDS:
        return eos
    found = (piece_id(tokenizer, piece, rows) for piece in DOCUMENT_ENDS)
    return next((id for id in found if id is not None), eos)


def _described(model: str | None, name: str) -> dict[str, Any]:
    """Return a JSON file of the model's folder; nothing where there is none."""
    path = Path(model or "") / name
    return read_json(path, "a model's JSON") if model and path.is_file() else {}


def _given_piece(tokenizer: Tokenizer, name: str, piece: str, rows: int) -> int:
    """Return the id of a piece of the settings. Raises UserError for one that cannot serve."""
    id = piece_id(tokenizer, piece, rows)
    if id is None:
        raise UserError(
            f"vocab.{name}={piece} must be a piece of the tokenizer with a row of the "
            f"model's {rows}, got none. Check vocab and tokenizer, or use vocab=auto"
        )
    if produced_by_text(tokenizer, id):
        raise UserError(
            f"vocab.{name}={piece} must be a control piece, got id {id}, an ordinary piece "
            "that texts produce. Check vocab and tokenizer, or use vocab=auto"
        )
    return id


def produced_by_text(tokenizer: Tokenizer, id: int) -> bool:
    """Return whether a text that spells no control piece can be encoded to this id.

    Merges depend on the piece alone: where a text leads to a piece, the piece's own
    characters do. A character beyond ASCII for which the tokenizer has byte pieces is out
    of reach, since bytes stand for it (conf/text/encoding.py).
    """
    piece = tokenizer.id_to_token(id)
    added = tokenizer.get_added_tokens_decoder().get(id)
    if piece is None or piece in CONTROL or (added and added.special):
        return False
    if added:  # Gemma adds runs of line ends, DeepSeek-Coder control pieces
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
    """Return the adaptive ids. Raises UserError for ids that cannot serve."""
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
    cure = f"Use vocab.adaptive=[{rows}], a row that training adds, or vocab=auto"
    beyond = sorted(id for id in adaptive if id is not None and id >= rows)
    if len({*adaptive, *control, None}) < len(adaptive) + len(
        {*control, None}
    ) or beyond != list(range(rows, rows + len(beyond))):
        raise UserError(
            "vocab.adaptive must be pieces or ids of the tokenizer, none of a control "
            f"piece, below the model's {rows} embedding rows or the next from there, got "
            f"{config.adaptive}. {cure}"
        )
    for id in adaptive:
        if id is not None and id < rows and produced_by_text(tokenizer, id):
            raise UserError(
                "vocab.adaptive must be pieces or ids that no text produces, got id "
                f"{id}, the ordinary piece {tokenizer.id_to_token(id)!r}. {cure}"
            )
    return tuple(adaptive)  # type: ignore[arg-type]


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer's files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path = Path(source) / name
        if path.is_file():
            shutil.copyfile(path, folder / name)
