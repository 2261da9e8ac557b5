import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.encode import Mode
from data_prep.packing import Encoded
from data_prep.runs import RunWriter, read_runs, token_dtype

DOCUMENTS = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.text(max_size=3), st.sampled_from(Mode), st.integers(0, 5)),
    max_size=30,
)


@given(DOCUMENTS, st.integers(1, 40), st.integers(1, 4), st.sampled_from([100, 2**20]))
def test_the_ranges_of_keys_hold_every_document_once(
    shapes: list[tuple[int, str, Mode, int]], run_bytes: int, ranges: int, vocab_size: int
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
        found = []
        for index in range(ranges):
            low, high = (2**64 * bound // ranges for bound in (index, index + 1))
            part = list(read_runs(stem, bounds, dtype, low, high))
            assert all(low <= key < high for key, _ in part)
            found += part
    assert sorted((k, d.language, d.id, d.mode, d.ids.tolist()) for k, d in found) == sorted(
        (k, d.language, d.id, d.mode, d.ids.tolist()) for k, d in documents
    )
