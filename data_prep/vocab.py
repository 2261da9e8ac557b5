"""The tokenizer and the ids of its control pieces: the one owner of both facts.

Vocab holds ids alone and travels in the manifest; Encoder turns text into ids, with
special pieces never matched in text.
"""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from conf import UserError
from data_prep.config import VocabConfig
from data_prep.words import Ragged, WordCache, falls_into_words

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


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
        return None not in (self.pre, self.suf, self.mid, self.eot)

    @property
    def control(self) -> frozenset[int]:
        """Ids that no text may produce."""
        ids = (self.bos, self.eos, self.pre, self.suf, self.mid, self.eot, *self.adaptive)
        return frozenset(id for id in ids if id is not None)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocab":
        """From the manifest."""
        return cls(**{**value, "adaptive": tuple(value["adaptive"])})


class Encoder:
    """Text to ids by a `tokenizers` file, in CodeLlama's two ways.

    enc(s) has the implicit leading space of SentencePiece, inf(s) has not; where the
    tokenizer adds no such space (byte-level BPE) they are the same.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: Vocab) -> None:
        described = json.loads(tokenizer.to_str())
        normalizer = described["normalizer"] or {}
        steps = normalizer.get("normalizers", [normalizer])
        self.implicit_space = any(step.get("type") == "Prepend" for step in steps)
        if self.implicit_space:
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
        # Source text that spells a special piece is text: it must never become a control id.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._model = tokenizer, tokenizer.model
        self._control = vocab.control
        pieces = [piece for id in vocab.control if (piece := tokenizer.id_to_token(id)) is not None]
        # Spelled with the space before them or not: "a<PRE>" is no more innocent than "a <PRE>".
        spellings = {piece.lstrip("▁") or piece for piece in pieces}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
        self._spellings = sorted(s for s in spellings if not any(o in s for o in spellings - {s}))
        # Its own pre-tokenizer cuts, and the library caches, where there is one.
        bpe = described["model"]["type"] == "BPE" and not described["pre_tokenizer"]
        by_words = bpe and self.implicit_space and falls_into_words(described["model"]["vocab"])
        self._encode = WordCache(self._word) if by_words else self._by_library

    def lead(self, text: str) -> str:
        """The text whose plain encoding is enc(text)."""
        return " " + text if self.implicit_space and text else text

    def spells_control(self, text: str) -> bool:
        """Whether a control piece is spelled in the text, which a careless encoder would make its id."""
        return any(spelling in text for spelling in self._spellings)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Plain encodings (inf) of many texts at once, never with a control id."""
        ids, lengths = self._encode(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(texts) else []

    def _by_library(self, texts: Sequence[str]) -> Ragged:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        found = [
            self._defuse(text) if self._has_control(one.ids) else one.ids
            for text, one in zip(texts, encoded, strict=True)
        ]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return np.fromiter(chain.from_iterable(found), np.int32, lengths.sum()), lengths

    def _word(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.replace(" ", "▁"))]
        return self._defuse(word) if self._has_control(ids) else ids

    def _has_control(self, ids: Sequence[int]) -> bool:
        return not self._control.isdisjoint(ids)

    def _defuse(self, text: str) -> list[int]:
        """Encode a text that spells a control piece: cut in the middle of each spelling, since in
        CodeLlama's tokenizer the merges themselves lead from " <PRE>" to its control id. A piece of
        one character cannot be cut: its bytes stand for it.
        """
        middles = [m.start() + len(m.group()) // 2 for m in self._spelled.finditer(text)]
        parts = [text[start:stop] for start, stop in pairwise([0, *middles, len(text)])]
        encoded = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        ids: list[int] = []
        for id in chain.from_iterable(part.ids for part in encoded):
            ids += self._bytes(id) if id in self._control else [id]
        assert not self._has_control(ids), "a text still yields a control id"
        return ids

    def _bytes(self, id: int) -> list[int]:
        """The byte pieces that spell what a piece spells. Raises UserError where there are none."""
        piece = self._tokenizer.id_to_token(id) or ""
        found = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in piece.replace("▁", " ").encode()]
        if not found or None in found:
            raise UserError(f"vocab: wanted control ids that no text spells, found {id} ({piece!r})")
        return found  # type: ignore[return-value]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The exact text of ids without control pieces, the inverse of inf()."""
        listed = np.asarray(ids).tolist()
        if not self.implicit_space:
            return self._tokenizer.decode(listed, skip_special_tokens=False)
        # The tokenizer's own decoder strips a leading space: shield it with a piece of text.
        shield = self._tokenizer.encode("\n", add_special_tokens=False).ids
        return self._tokenizer.decode(shield + listed, skip_special_tokens=False)[1:]


def tokenizer_file(folder: str | Path) -> Path:
    """The tokenizer.json of a folder. Raises UserError where there is none."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"tokenizer={folder}: wanted a folder with tokenizer.json, found none")
    return path


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder. Raises UserError where there is none."""
    path = tokenizer_file(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception on a malformed file
        raise UserError(f"{path}: wanted a tokenizers file, found {error}") from error


def find_vocab(tokenizer: Tokenizer, config: VocabConfig, *, rows: int | None = None) -> Vocab:
    """Look up the control pieces; `rows` are the embedding rows of the model, where they are known.

    Infilling pieces without a row are none: the files of CodeLlama-34B list some that its
    model lacks. Adaptive ids may be the next rows, which training adds. Raises UserError
    for a missing BOS, EOS or adaptive token.
    """
    rows = config.rows or rows or tokenizer.get_vocab_size(with_added_tokens=True)
    ids = {name: tokenizer.token_to_id(getattr(config, name)) for name in ("bos", "eos")}
    for name, id in ids.items():
        if id is None:
            raise UserError(f"vocab.{name}={getattr(config, name)}: the tokenizer has no such piece")
    infilling = {name: tokenizer.token_to_id(getattr(config, name)) for name in ("pre", "suf", "mid", "eot")}
    infilling = {name: id if id is not None and id < rows else None for name, id in infilling.items()}
    adaptive = _adaptive_ids(tokenizer, config, rows)
    size = max(rows, *(id + 1 for id in adaptive))
    return Vocab(size=size, adaptive=adaptive, **ids, **infilling)  # type: ignore[arg-type]


def _adaptive_ids(tokenizer: Tokenizer, config: VocabConfig, rows: int) -> tuple[int, ...]:
    adaptive: list[int] = []
    for wanted in config.adaptive:
        id = tokenizer.token_to_id(wanted) if isinstance(wanted, str) else wanted
        if not isinstance(id, int) or id < 0:
            raise UserError(f"vocab.adaptive: wanted pieces or ids of the tokenizer, found {wanted!r}")
        adaptive.append(id)
    if not adaptive or len(set(adaptive)) < len(adaptive):
        raise UserError(f"vocab.adaptive: wanted at least one id, each once, found {config.adaptive}")
    beyond = sorted(id for id in adaptive if id >= rows)
    if beyond != list(range(rows, rows + len(beyond))):
        raise UserError(
            f"vocab.adaptive: wanted ids below the model's {rows} embedding rows, or the next from {rows} on, "
            f"found {', '.join(map(str, beyond))} (vocab=codellama_34b has them for CodeLlama 34B and Python)"
        )
    return tuple(adaptive)


def read_model(folder: str | Path) -> dict[str, Any]:
    """The config.json of the model beside a tokenizer; empty where there is none."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def check_model(folder: str | Path, vocab: Vocab) -> None:
    """Raises UserError when the model beside the tokenizer has another BOS or EOS."""
    model = read_model(folder)
    for name, id in (("bos", vocab.bos), ("eos", vocab.eos)):
        theirs = model.get(f"{name}_token_id")
        if theirs is not None and id not in (theirs if isinstance(theirs, list) else [theirs]):
            raise UserError(
                f"tokenizer={folder}: wanted the {name.upper()} id {theirs} of the model in config.json, "
                f"found {id} (vocab.{name})"
            )


def train_bpe(texts: Iterable[str], config: VocabConfig) -> Tokenizer:
    """A byte-level BPE of `train_size` ids with CodeLlama's control pieces, for the demo."""
    assert config.train_size is not None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [config.bos, config.eos, config.pre, config.suf, config.mid, config.eot]
    special = control + [name for name in config.adaptive if isinstance(name, str)]
    trainer = trainers.BpeTrainer(
        vocab_size=config.train_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # An iterable of strings, so that no file is read a second time.
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(config.bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{config.bos} $A", special_tokens=[(config.bos, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, config: VocabConfig, source: str | None, folder: Path) -> None:
    """Put the tokenizer beside the shards, as Transformers reads it: copied, or written when it was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        for name in FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": config.bos,
        "eos_token": config.eos,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
