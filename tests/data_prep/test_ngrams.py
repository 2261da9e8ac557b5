"""The n-gram table against dictionaries; its tasks on shards that are made here."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from conf import UserError
from conf.files import write_json
from conf.stage import read_manifest
from data_prep import ngram_tasks
from data_prep.config import DataConfig, DataPrepConfig, NgramsConfig
from data_prep.encode import Mode
from data_prep.job import FACTS, PLAN, Job
from data_prep.ngrams import (
    MULTIPLIER,
    STRENGTH,
    SUCCESSORS,
    TABLE,
    NgramCounts,
    Packing,
    count_ngrams,
    descend,
    find_table,
    hash_contexts,
    link_table,
    merge,
)
from data_prep.packing import Encoded, pack
from data_prep.phases import PHASES
from data_prep.pipeline import prepare
from data_prep.shards import ShardWriter
from data_prep.vocab import Vocab
from tests.conftest import data_settings


def slow_counts(
    sequences: Sequence[Sequence[int]], order: int
) -> dict[tuple[int, ...], Counter[int]]:
    """Successors of each context of order - 1 tokens, the oldest first."""
    result: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in sequences:
        for last in range(order - 1, len(tokens)):
            result[tuple(tokens[last - order + 1 : last])][tokens[last]] += 1
    return result


def slow_key(context: Sequence[int]) -> int:
    key = 0
    for token in reversed(context):
        key = (key + token + 1) * MULTIPLIER % 2**64
    return key


def slow_table(
    sequences: Sequence[Sequence[int]], order: int, vocabulary: int, size: int
) -> dict[str, Any]:
    """The file's tensors as lists: every context by its gain for a byte, the best until `size` is full."""
    counts = {o: slow_counts(sequences, o) for o in range(1, order + 1)}
    tokens = sum(map(len, sequences))

    def chance(context: tuple[int, ...], token: int) -> float:
        if not context:
            return counts[1][()][token] / tokens
        own = counts[len(context) + 1][context]
        return (own[token] + STRENGTH * chance(context[1:], token)) / (
            own.total() + STRENGTH
        )

    ranked = []
    for o in range(2, order + 1):
        for context, successors in counts[o].items():
            likely = sorted(successors.items(), key=lambda item: (-item[1], item[0]))[
                :SUCCESSORS
            ]
            likely = [(token, count) for token, count in likely if count > 1]
            gain = sum(
                (n - 1) * math.log(chance(context, t) / chance(context[1:], t))
                for t, n in likely
            )
            room = 16 + (6 if vocabulary <= 2**16 else 8) * len(likely)
            if gain > 0:
                rank = -np.float32(gain / room), o, slow_key(context)
                ranked.append((*rank, room, successors.total(), likely))
    ranked.sort()
    while sum(context[3] for context in ranked) > size:
        ranked.pop()
    table: dict[str, Any] = {
        "unigrams": [counts[1][()][token] for token in range(vocabulary)]
    }
    for o in range(2, order + 1):
        rows = sorted(
            (key, total, likely) for _, own, key, _, total, likely in ranked if own == o
        )
        table[f"keys_{o}"] = [key for key, _, _ in rows]
        table[f"totals_{o}"] = [total for _, total, _ in rows]
        table[f"first_{o}"] = [
            0,
            *np.cumsum([len(likely) for _, _, likely in rows]).tolist(),
        ]
        table[f"ids_{o}"] = [token for _, _, likely in rows for token, _ in likely]
        table[f"counts_{o}"] = [count for _, _, likely in rows for _, count in likely]
    return table


def as_dictionary(ngrams: NgramCounts) -> dict[tuple[int, ...], Counter[int]]:
    """The contexts without padding."""
    order, result = (
        ngrams.packing.order,
        defaultdict[tuple[int, ...], Counter[int]](Counter),
    )
    columns = [
        ngrams.token(place).tolist()
        for place in (*reversed(range(order - 1)), order - 1)
    ]
    for *context, token, count in zip(*columns, ngrams.counts.tolist(), strict=True):
        if ngrams.packing.vocabulary not in context:
            result[tuple(context)][token] += count
    return result


@given(st.data(), st.integers(2, 8), st.sampled_from([3, 511, 32016, 65536, 152064]))
def test_n_grams_of_all_orders_are_counted(
    data: st.DataObject, order: int, vocabulary: int
) -> None:
    ids = st.sampled_from(sorted({0, 1, 2, vocabulary // 2, vocabulary - 1}))
    sequences = data.draw(
        st.lists(st.lists(ids, min_size=1, max_size=30), min_size=2, max_size=6)
    )
    packing, middle = Packing(order, vocabulary), len(sequences) // 2
    halves = sequences[:middle], sequences[middle:]
    parts = [count_ngrams([np.array(own) for own in half], packing) for half in halves]
    for level, (ngrams, _) in enumerate(descend(merge(parts))):
        assert as_dictionary(ngrams) == slow_counts(sequences, order - level)
        rows = [tuple(row) for row in ngrams.words.T.tolist()]
        assert rows == sorted(set(rows))


def test_keys_are_nested_from_the_latest_token() -> None:
    """Decoders of other versions hash too: the numbers are part of the format."""
    assert (
        hash_contexts([np.array([5])]).tolist()
        == [6 * 0x9E3779B97F4A7C15 % 2**64]
        == [0xB54CDA58FBBEE87E]
    )
    key = (0xB54CDA58FBBEE87E + 8) * 0x9E3779B97F4A7C15 % 2**64
    assert hash_contexts([np.array([5]), np.array([7])]).tolist() == [key]


VOCABULARY = 40


def sequences_of(tokens: int) -> list[list[int]]:
    """Text in which some pairs are frequent, as documents of 5 to 90 tokens."""
    generator = np.random.default_rng(0)
    text = (generator.zipf(1.4, tokens) % VOCABULARY).astype(int)
    text[1::3] = (text[:-1:3][: len(text[1::3])] * 7 + 1) % VOCABULARY
    return [
        part.tolist()
        for part in np.split(text, np.cumsum(generator.integers(5, 90, tokens // 60)))
    ]


def counted_job(
    folder: Path, documents: Sequence[Sequence[int]], **ngrams: int
) -> tuple[Job, list[list[int]]]:
    """A job whose phases up to pack have been run, with two shards, and the sequences in them."""
    data, chosen = DataConfig(path="unread"), NgramsConfig(**ngrams)
    job = Job(
        DataPrepConfig(
            out=str(folder), data=data, tokenizer="unread", seq_len=64, ngrams=chosen
        ),
        folder,
    )
    vocab = Vocab(
        size=VOCABULARY + 2,
        bos=0,
        eos=1,
        pre=None,
        suf=None,
        mid=None,
        eot=None,
        adaptive=(40, 41),
    )
    write_json(folder / PLAN, {"parts": [], "vocab": vocab.to_json()})
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    encoded = [
        Encoded(str(index), 0, Mode.PLAIN, np.array(own))
        for index, own in enumerate(documents)
    ]
    sequences: list[list[int]] = []
    for shard, own in enumerate((encoded[::2], encoded[1::2])):
        job.done("pack", shard).mkdir(parents=True)
        stem = job.done("pack", shard) / f"train-{shard:05d}"
        writer = ShardWriter(stem, seq_len=64, dtype=np.dtype("<u2"), padding=1)
        for packed in pack(own, 64):
            writer.add(packed)
            sequences.append(packed.tokens(64, 1)[: packed.used].tolist())
        write_json(
            job.done("pack", shard) / FACTS, {"split": "train", **writer.close()}
        )
    job.done("tally").mkdir(parents=True)
    write_json(job.done("tally") / FACTS, {"train": {"shards": 2}})
    return job, sequences


def make_table(job: Job) -> Path:
    """Run the table's phases."""
    for phase in PHASES[-3:]:
        for task in range(phase.tasks(job)):
            phase.run_task(job, task)
    return job.done("select") / TABLE


@pytest.mark.parametrize(
    ("order", "budget"), [(1, None), (2, None), (3, None), (5, None), (3, 3000)]
)
def test_the_table_is_that_of_dictionaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, budget: int | None
) -> None:
    """A budget has the contexts that gain most."""
    if budget:
        monkeypatch.setattr(ngram_tasks, "RANGE", 1500)
        monkeypatch.setattr(ngram_tasks, "_budget", lambda job, packing: budget)
    job, sequences = counted_job(tmp_path, sequences_of(4000), order=order)
    table = {
        name: tensor.tolist() for name, tensor in load_file(make_table(job)).items()
    }
    assert table == slow_table(sequences, order, VOCABULARY, budget or 32 * 10**6)
    if order > 1:
        assert max(np.diff(table["first_2"])) == SUCCESSORS and table[f"keys_{order}"]


@pytest.mark.parametrize("budget", [1000, 3012, 3020, 10**6])
def test_units_and_ranges_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Also of tokens that are so frequent that one range is read in pieces."""
    documents = sequences_of(4000)
    monkeypatch.setattr(ngram_tasks, "_budget", lambda job, packing: budget)
    whole = make_table(counted_job(tmp_path / "whole", documents)[0]).read_bytes()
    monkeypatch.setattr(ngram_tasks, "UNIT", 300)
    monkeypatch.setattr(ngram_tasks, "RANGE", 600)
    job, _ = counted_job(tmp_path / "parts", documents)
    assert make_table(job).read_bytes() == whole
    unigrams = ngram_tasks.count_unigrams(job)
    assert (
        unigrams.max() > 300
        and ngram_tasks.range_count(job) > 10
        and len(ngram_tasks.units(job)) > 10
    )


def test_of_many_tokens_sequences_at_even_distances_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_tasks, "COUNTED_TOKENS", 1600)
    job, sequences = counted_job(tmp_path, sequences_of(4000))
    units = ngram_tasks.units(job)
    first = job.read_facts("pack", 0)["sequences"]
    places = [unit.shard * first + row for unit in units for row in unit.rows.tolist()]
    assert (
        set(np.diff(places)) == {2, 3}
        and sum(len(sequences[place]) for place in places) <= 1600
    )
    assert len(places) == len(sequences) * 1600 // sum(map(len, sequences))


def test_a_data_folder_may_have_none(tmp_path: Path) -> None:
    prepare(
        data_settings(
            tmp_path / "out", "ngrams.megabytes=0", "data.include=[json/*.py]"
        )
    )
    assert "ngrams" not in read_manifest(tmp_path / "out", "shards", "out")
    assert not (tmp_path / "out" / TABLE).exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda data: data[:-1],
            "must be a whole n-gram table, got a checksum mismatch",
        ),
        (
            lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "got a checksum mismatch",
        ),
        (
            lambda data: data.replace(b"ngrams 1", b"ngrams 9"),
            "of format adaptive-tokens ngrams 1, got ada",
        ),
        (
            lambda data: data.replace(b'lary": "40"', b'lary": "41"'),
            "of vocabulary 40, got 41",
        ),
        (lambda data: data[:300], "must be an n-gram table, got "),
        (lambda data: b"\2\0\0\0\0\0\0\0[]", "must be an n-gram table, got "),
    ],
)
def test_a_damaged_or_foreign_table_is_one_sentence(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    job, _ = counted_job(tmp_path / "job", sequences_of(600))
    path, tokenizer = make_table(job), job.folder / "tokenizer" / "tokenizer.json"
    assert find_table(path.parent, vocabulary=VOCABULARY, tokenizer=tokenizer) == path
    assert find_table(tmp_path, vocabulary=VOCABULARY, tokenizer=tokenizer) is None
    with pytest.raises(
        UserError, match="must be an n-gram table of tokenizer .*, got "
    ):
        find_table(path.parent, vocabulary=VOCABULARY, tokenizer=path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"{TABLE} must be .*") as refused:
        find_table(path.parent, vocabulary=VOCABULARY, tokenizer=tokenizer)
    assert sentence in str(refused.value)


def test_a_table_is_linked_or_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("table")
    for _ in range(2):  # a run that goes on does it again
        link_table(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here"))
        )
        link_table(tmp_path / "a", tmp_path / "b")
    assert (
        not (tmp_path / "b").samefile(tmp_path / "a")
        and (tmp_path / "b").read_text() == "table"
    )
