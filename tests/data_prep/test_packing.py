import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.encode import Mode
from data_prep.packing import Encoded, pack
from data_prep.runs import RunWriter, read_runs, token_dtype

DOCUMENTS = st.lists(
    st.tuples(st.sampled_from(Mode), st.integers(1, 40)).filter(
        lambda d: d[0] is Mode.PLAIN or d[1] <= 16
    )
)


KEYED = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1),
        st.text(max_size=3),
        st.sampled_from(Mode),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(KEYED, st.integers(1, 40), st.integers(1, 4), st.sampled_from([100, 2**20]))
def test_the_ranges_of_keys_hold_every_document_once(
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


@given(DOCUMENTS, st.integers(0, 4))
def test_nothing_is_lost_and_no_infilling_document_is_cut(
    shapes: list[tuple[Mode, int]], patience: int
) -> None:
    documents = [
        Encoded(str(i), 0, mode, np.arange(n) + 1000 * i)
        for i, (mode, n) in enumerate(shapes)
    ]
    result: dict[str, list[np.ndarray]] = {document.id: [] for document in documents}
    for packed in pack(documents, 16, patience=patience):
        tokens = packed.tokens(16, -1)
        end = 0
        for span in packed.spans:
            assert end == span.start < span.stop
            end = span.stop
            parts = result[span.document.id]
            assert span.offset == sum(map(len, parts))
            parts.append(tokens[span.start : span.stop])
        assert len(tokens) == 16 and (tokens[packed.used :] == -1).all()
    for document in documents:
        parts = result[document.id]
        assert np.array_equal(np.concatenate(parts), document.ids)
        assert document.mode is Mode.PLAIN or len(parts) == 1
