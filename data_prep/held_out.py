"""The held-out documents as text: prompts for whoever measures the model later. Knows no tokens.

Written part by part as they come, read once in the order of their keys. Only the keys and
places are ever in memory.
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.document import Document
from data_prep.shards import save_array

TEXTS = "held_out.jsonl"
PLACES = "held_out.npy"


class HeldOutWriter:
    """Writes one part's documents; where each one stands is written on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = array("Q")  # key, start and stop of each document

    def __enter__(self) -> "HeldOutWriter":
        self._file = open(self._folder / TEXTS, "wb")  # noqa: SIM115 (until exit)
        return self

    def add(self, key: int, document: Document) -> None:
        """Append one document."""
        row = {"id": document.id, "language": document.language, "content": document.text}
        start = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._places.extend((key, start, self._file.tell()))

    def __exit__(self, *_: object) -> None:
        self._file.close()
        save_array(self._folder / PLACES, np.array(self._places, dtype=np.uint64).reshape(-1, 3))


def merge_held_out(folders: Sequence[Path], out: Path) -> None:
    """All parts' documents in one file, by key; of equal keys the earlier part's comes first."""
    places = [np.load(folder / PLACES) for folder in folders]
    parts = np.repeat(np.arange(len(folders)), [len(own) for own in places])
    every = np.concatenate(places)
    with open(out, "wb") as file:
        for index in np.argsort(every[:, 0], kind="stable").tolist():
            _, start, stop = every[index].tolist()
            with open(folders[parts[index]] / TEXTS, "rb") as part:
                part.seek(start)
                file.write(part.read(stop - start))
