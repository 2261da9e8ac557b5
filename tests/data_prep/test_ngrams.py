"""The n-gram table agrees with a table made by dictionaries."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from conf.errors import UserError
from data_prep import ngram_tasks
from data_prep.ngrams import (
    MULTIPLIER,
    STRENGTH,
    SUCCESSORS,
    TABLE,
    find_table,
    hash_contexts,
    link_table,
)
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from tests.conftest import data_settings
from tests.infer.ngram_tables import columns, count_ngrams


def slow_key(context: Sequence[int]) -> int:
    key = 0
    for token in reversed(context):
        key = (key + token + 1) * MULTIPLIER % 2**64
    return key


def slow_table(
    sequences: Sequence[Sequence[int]], order: int, vocabulary: int, size: int
) -> dict[str, Any]:
    """Return the file's tensors as lists: contexts by gain per byte, the best until `size` bytes are full."""
    counts = count_ngrams(sequences, range(order))

    def chance(context: tuple[int, ...], token: int) -> float:
        own = counts[context]
        if not context:
            return own[token] / own.total()
        return (own[token] + STRENGTH * chance(context[1:], token)) / (
            own.total() + STRENGTH
        )

    ranked = []
    for context, successors in counts.items():
        if not context:
            continue
        likely = sorted(successors.items(), key=lambda item: (-item[1], item[0]))
        likely = [item for item in likely[:SUCCESSORS] if item[1] > 1]
        gain = sum(
            (n - 1) * math.log(chance(context, t) / chance(context[1:], t))
            for t, n in likely
        )
        room = 16 + (6 if vocabulary <= 2**16 else 8) * len(likely)
        if gain > 0:
            rank = -np.float32(gain / room), len(context), slow_key(context)
            ranked.append((rank, room, successors.total(), likely))
    ranked.sort()
    while sum(room for _, room, *_ in ranked) > size:
        ranked.pop()
    table: dict[str, Any] = {
        "unigrams": [counts[()][token] for token in range(vocabulary)]
    }
    for length in range(1, order):
        rows = sorted(
            (key, total, likely)
            for (_, own, key), _, total, likely in ranked
            if own == length
        )
        table |= columns(length, rows)
    return table


def prepared(out: Path, *overrides: str) -> tuple[Path, list[list[int]]]:
    """Return the table of a small data folder, and the sequences in its shards."""
    prepare(data_settings(out, "data.include=[json/*.py]", *overrides))
    shards = Shards(out, "train")
    sequences = [sequence.tokens[: sequence.used].tolist() for sequence in shards]
    return out / TABLE, sequences


@pytest.mark.parametrize(("order", "budget"), [(1, None), (8, None), (3, 3000)])
def test_the_table_equals_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, budget: int | None
) -> None:
    """With a size limit the table has the contexts of most gain. N-grams of order 8 take two words."""
    if budget:
        monkeypatch.setattr(ngram_tasks, "SLICE", 1500)
        monkeypatch.setattr(ngram_tasks, "RANGE", 3000)
        monkeypatch.setattr(ngram_tasks, "_budget", lambda job, packing: budget)
    path, sequences = prepared(tmp_path / "out", f"ngrams.order={order}")
    table = {name: tensor.tolist() for name, tensor in load_file(path).items()}
    vocabulary = len(table["unigrams"])
    assert table == slow_table(sequences, order, vocabulary, budget or 32 * 10**6)
    if order > 1:
        assert max(np.diff(table["first_2"])) == SUCCESSORS


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data[:-1], "got a checksum mismatch"),
        (
            lambda data: data.replace(b"ngrams 1", b"ngrams 9"),
            "with format adaptive-tok",
        ),
        (lambda data: data[:300], "must be an n-gram table, got "),
    ],
)
def test_a_damaged_or_foreign_table_is_one_sentence(
    data_folder: Path, tmp_path: Path, change: Any, sentence: str
) -> None:
    path, tokenizer = tmp_path / TABLE, data_folder / "tokenizer" / "tokenizer.json"
    vocabulary = len(load_file(data_folder / TABLE)["unigrams"])
    link_table(data_folder / TABLE, path)
    assert find_table(tmp_path, vocabulary=vocabulary, tokenizer=tokenizer) == path
    with pytest.raises(
        UserError, match="must be an n-gram table with tokenizer .*, got"
    ):
        find_table(tmp_path, vocabulary=vocabulary, tokenizer=path)
    path.unlink()
    path.write_bytes(change((data_folder / TABLE).read_bytes()))
    with pytest.raises(UserError, match=sentence):
        find_table(tmp_path, vocabulary=vocabulary, tokenizer=tokenizer)


def test_keys_are_nested_from_the_latest_token() -> None:
    """The hash is part of the format, since decoders of other versions compute it too."""
    key = (0xB54CDA58FBBEE87E + 8) * 0x9E3779B97F4A7C15 % 2**64
    assert hash_contexts([np.array([5])]).tolist() == [0xB54CDA58FBBEE87E]
    assert hash_contexts([np.array([5]), np.array([7])]).tolist() == [key]
