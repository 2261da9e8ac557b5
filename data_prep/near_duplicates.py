"""Removal of near-duplicates by datatrove's MinHash: 14 buckets of 8 hashes of 5-grams of words,
which finds pairs of similarity 0.8 with probability 0.92 and keeps one of each cluster.

The three phases before the filter: signatures of a part, pairs in a bucket, clusters of all.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from data_prep.document import Document, Drop
from data_prep.job import Job, documents_of
from data_prep.screen import drop

BUCKETS = 14  # datatrove's default
WORD = re.compile(r"\w+")


def sign(job: Job, part: int) -> dict[str, Any]:
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
            return [found.span() for found in WORD.finditer(text)]

    _quiet()
    rows: list[tuple[str, int]] = []

    def texts() -> Any:
        for document in documents_of(job.screened(job.rows(part))):
            rows.append((document.file, document.row))
            yield Text(text=document.text, id=document.id)

    # The library's default hash fails on text with xxhash 4.
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    step = MinhashDedupSignature(str(job.work / "signatures"), config, language=CodeWords())
    step.run(texts(), rank=part, world_size=len(job.parts))
    return {"rows": rows}


def match(job: Job, bucket: int) -> dict[str, Any]:
    """Pairs of documents with the same signature in one bucket."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets

    _quiet()
    step = MinhashDedupBuckets(str(job.work / "signatures"), str(job.work / "pairs"))
    step.run(rank=bucket, world_size=BUCKETS)
    return {}


def cluster(job: Job, _: int) -> dict[str, Any]:
    """All but one of each cluster of documents, by part."""
    from datatrove.pipeline.dedup import MinhashDedupCluster

    _quiet()
    MinhashDedupCluster(str(job.work / "pairs"), str(job.work / "removals")).run()
    return {}


def unique(job: Job, part: int, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
    """The rows of a part, less the near-duplicates of others."""
    path = job.work / "removals" / f"{part:06d}.remove"
    if not job.config.near_duplicates or not path.is_file():
        yield from rows
        return
    signed = job.read_facts("sign", part)["rows"]
    removed = {tuple(signed[index]) for index in np.fromfile(path, dtype="<u4").tolist()}
    for row in rows:
        duplicate = isinstance(row, Document) and (row.file, row.row) in removed
        yield drop(row, "near-duplicate") if duplicate else row


def _quiet() -> None:
    from loguru import logger

    logger.disable("datatrove")
