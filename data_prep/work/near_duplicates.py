"""Removal of near-duplicates by datatrove's MinHash: 14 buckets of 8 hashes of 5-grams of words,
which finds pairs of similarity 0.8 with probability 0.92 and keeps one of each cluster.

The three phases before the filter: signatures of a part, pairs in a bucket, clusters of all.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conf.files import allow_many_files
from data_prep.document import Document, Drop
from data_prep.select.screen import drop
from data_prep.work.job import Job, documents_of

BUCKETS = 14  # datatrove's default
SIGNED_CHARS = 100_000  # of a document, since the library holds 112 hashes of every word at once
WORD = re.compile(r"\w+")


def sign(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """MinHash signatures of a part's documents, and which rows they are."""
    from datatrove.data import Document as Text
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import HashConfig, MinhashConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class CodeWords(WordTokenizer):
        """Words of source code, where the library's own are those of natural languages."""

        def word_tokenize(self, text: str) -> list[str]:
            return WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return text.splitlines()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in WORD.finditer(text)]

    _begin()
    rows: list[tuple[str, int]] = []

    def texts() -> Any:
        for document in documents_of(job.screened(job.rows(part))):
            rows.append((document.file, document.row))
            yield Text(text=document.text[:SIGNED_CHARS], id=document.id)

    # The library's default hash fails on text with xxhash 4.
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    step = MinhashDedupSignature(str(folder), config, language=CodeWords())
    step.run(texts(), rank=part, world_size=len(job.parts))
    _move(folder, job.work / "signatures")
    return {"rows": rows}


def match(job: Job, bucket: int, folder: Path) -> dict[str, Any]:
    """Pairs of documents with the same signature in one bucket."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets

    _begin()
    step = MinhashDedupBuckets(str(job.work / "signatures"), str(folder))
    step.run(rank=bucket, world_size=BUCKETS)
    _move(folder, job.work / "pairs")
    return {}


def cluster(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """All but one of each cluster of documents, by part."""
    from datatrove.pipeline.dedup import MinhashDedupCluster

    _begin()
    MinhashDedupCluster(str(job.work / "pairs"), str(folder)).run()
    return {}


def _move(folder: Path, target: Path) -> None:
    """Put a task's files among those of all tasks, each in one step."""
    for path in folder.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)


def unique(job: Job, part: int, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
    """The rows of a part, less the near-duplicates of others."""
    path = job.done("cluster") / f"{part:06d}.remove"
    if not job.config.near_duplicates or not path.is_file():
        yield from rows
        return
    signed = job.read_facts("sign", part)["rows"]
    removed = {tuple(signed[index]) for index in np.fromfile(path, dtype="<u4").tolist()}
    for row in rows:
        if isinstance(row, Document) and (row.file, row.row) in removed:
            yield drop(row, "near-duplicate")
        else:
            yield row


def _begin() -> None:
    from loguru import logger

    logger.disable("datatrove")
    allow_many_files()  # it opens one of every part at once
