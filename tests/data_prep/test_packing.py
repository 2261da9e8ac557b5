import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.encode import Mode
from data_prep.packing import Encoded, pack
from data_prep.runs import RunWriter, read_runs, token_dtype
from data_prep.shards import SPAN, PackedSequence, ShardWriter
from data_prep.windows import replaceable
from train.objective import IGNORE, next_tokens

KEYED = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1),
        st.text(max_size=3),
        st.sampled_from(Mode),
        st.integers(0, 5),
    ),
    max_size=30,
)


def test_a_part_may_have_more_than_65536_languages(tmp_path: Path) -> None:
    """Bug: a column of URLs as data.language ended in an OverflowError, not in a message."""
    dtype = token_dtype(9)
    writer = RunWriter(tmp_path / "a", dtype)
    writer.add(0, Encoded("id", 70_000, Mode.PLAIN, np.arange(3)))
    ((_, document),) = read_runs(tmp_path / "a", writer.close(), dtype, 0, 1)
    assert document.language == 70_000


@given(KEYED, st.integers(1, 40), st.integers(1, 4), st.sampled_from([100, 2**20]))
def test_the_ranges_of_keys_contain_every_document_once(
    shapes: list[tuple[int, str, Mode, int]],
    run_bytes: int,
    ranges: int,
    vocab_size: int,
) -> None:
    dtype = token_dtype(vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "a"
        writer = RunWriter(stem, dtype, run_bytes)
        documents = [
            (key, Encoded(id, index, mode, np.arange(index, index + n)))
            for index, (key, id, mode, n) in enumerate(shapes)
        ]
        for key, document in documents:
            writer.add(key, document)
        bounds = writer.close()
        result = []
        for index in range(ranges):
            low, high = (2**64 * bound // ranges for bound in (index, index + 1))
            part = list(read_runs(stem, bounds, dtype, low, high))
            assert all(low <= key < high for key, _ in part)
            result += part
    rows, expected = (
        sorted((key, d.language, d.id, d.mode, d.ids.tolist()) for key, d in listed)
        for listed in (result, documents)
    )
    assert rows == expected


# Mode, size and prompt of each document.
SHAPES = st.lists(
    st.tuples(st.sampled_from(Mode), st.integers(1, 40), st.integers(0, 40)).filter(
        lambda shape: shape[0] in (Mode.PLAIN, Mode.CHAT) or shape[1] <= 16
    ),
    min_size=1,
    max_size=30,
)


@given(SHAPES, st.integers(0, 4))
def test_sequences_contain_every_document_and_labels_of_its_answers(
    shapes: list[tuple[Mode, int, int]], patience: int
) -> None:
    """No token is lost. Only plain documents, and chat documents longer than a sequence, are cut.

    Labels and windows equal the result of a walk over every token of the documents.
    """
    n = 16
    documents = [
        Encoded(
            str(i),
            0,
            mode,
            np.arange(size) + 100 * i,
            min(prompt, size) if mode is Mode.CHAT else 0,
        )
        for i, (mode, size, prompt) in enumerate(shapes)
    ]
    packed = list(pack(documents, n, patience=patience))
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "train-00000"
        writer = ShardWriter(stem, seq_len=n, dtype=np.dtype("<u4"), padding=5000)
        for sequence in packed:
            writer.add(sequence)
        writer.close()
        tokens = np.load(f"{stem}.tokens.npy").astype(np.int64)
        spans = np.load(f"{stem}.spans.npy")
    assert tokens.shape == (len(packed), n) and spans.dtype == SPAN
    result: dict[str, list[np.ndarray]] = {document.id: [] for document in documents}
    for row, sequence in enumerate(packed):
        labels = [IGNORE] * n
        free = [False] * n
        end = 0
        for span in sequence.spans:
            assert end == span.start < span.stop
            end = span.stop
            parts = result[span.document.id]
            assert span.offset == sum(map(len, parts))
            parts.append(tokens[row, span.start : span.stop])
            # The first token of a part has no label, since no token precedes it.
            for place in range(span.start + 1, span.stop):
                index = span.offset + place - span.start
                if index >= span.document.prompt:
                    labels[place - 1] = int(span.document.ids[index])
                    free[place] = True
        assert sequence.used == end and (tokens[row, end:] == 5000).all()
        own = spans[spans["sequence"] == row]
        read_back = PackedSequence(tokens[row], own, np.empty(0, np.uint8)).documents
        learned = next_tokens(tokens[row][None], read_back[None])[0]
        assert learned.tolist() == labels
        # A token without a label may be replaceable, but is never laid out.
        windows = replaceable(tokens[row][None], read_back[None], [])[0]
        assert windows.tolist() == free
    for document in documents:
        parts = result[document.id]
        assert np.array_equal(np.concatenate(parts), document.ids)
        whole = len(parts) == 1 or document.mode is Mode.PLAIN
        assert whole or len(document.ids) > n
