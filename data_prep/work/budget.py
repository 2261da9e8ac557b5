"""The budget as phases: measure every part, choose thresholds, let the chosen documents through.

Knows tasks and files; what is chosen is data_prep.select.choice's to say.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from conf import UserError
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop, split, unit
from data_prep.encode.documents import encode
from data_prep.select.choice import BINS, Measure, bin_of, choose, own_shares
from data_prep.select.screen import drop
from data_prep.work.job import Job, documents_of
from data_prep.work.near_duplicates import unique

SAMPLE_BYTES = 16_000_000  # of input whose tokens are counted, to know a language's tokens per byte
LONGEST_FIELD = 2**31 - 1  # characters of a field of a proportion table
BINS_FILE = "bins.npz"
COLUMNS = {"bytes": ("bytes", "characters"), "files": ("files", "documents")}  # of a proportion table


def measure(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Count a part's documents by language and bin, as far as they pass the screen."""
    config = job.config
    measures: dict[str, Measure] = {}
    sample: list[Document] = []
    rate = min(1.0, SAMPLE_BYTES / max(1, sum(part.size for part in job.parts)))
    for document in documents_of(job.screened(unique(job, part, job.rows(part)))):
        if document.language not in measures:
            measures[document.language] = Measure.empty()
        counted = measures[document.language]
        size, place = len(document.text.encode()), bin_of(config.seed, document.id)
        counted.files[place] += 1
        counted.bytes[place] += size
        if config.proportion.unit == "tokens" and unit(config.seed, "sample", document.id) < rate:
            sample += split(document, config.data.split_chars)
            counted.sample_bytes += size
    # In batches: every call of the encoder that meets new words copies its table of words.
    for document, _, ids in encode(sample, config, job.vocab, job.encoder) if sample else ():
        measures[document.language].sample_tokens += len(ids)
    files, sizes = ([getattr(m, kind) for m in measures.values()] for kind in ("files", "bytes"))
    np.savez_compressed(folder / BINS_FILE, files=np.array(files), bytes=np.array(sizes))
    return {"languages": {name: [m.sample_tokens, m.sample_bytes] for name, m in measures.items()}}


def choose_documents(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Add up what was measured and find each language's threshold."""
    config, amount = job.config, job.config.budget_amount
    assert amount is not None
    measures: dict[str, Measure] = {}
    for part in range(len(job.parts)):
        bins = np.load(job.done("measure", part) / BINS_FILE)
        listed = job.read_facts("measure", part)["languages"]
        # Indexing an archive reads it: once, not for every language.
        for (name, (tokens, size)), files, byte_counts in zip(listed.items(), bins["files"], bins["bytes"]):
            total = measures.setdefault(name, Measure.empty())
            total += Measure(files, byte_counts, tokens, size)
    by = config.proportion.by
    shares = job.plan["shares"] or own_shares(measures, by)
    chosen = choose(measures, shares, amount=amount, by=by, unit=config.proportion.unit)
    return {"chosen": {name: asdict(part) for name, part in sorted(chosen.items())}}


def read_table(config: DataPrepConfig) -> dict[str, float]:
    """Languages and their sizes from the user's CSV file: its first column and the one of bytes or files.

    Raises UserError for a file that is no such table.
    """
    path, by = str(config.proportion.table), config.proportion.by
    csv.field_size_limit(LONGEST_FIELD)  # Python's own is 131,072 characters
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        column = next(name for name in COLUMNS[by] if rows and name in rows[0])
        sizes = {next(iter(row.values())): float(row[column]) for row in rows}
        for language, size in sizes.items():
            if not 0 <= size < math.inf:
                raise ValueError(f"{column}={size:g} of {language}")
        return sizes
    except (OSError, ValueError, TypeError, StopIteration, csv.Error) as error:
        wanted = f"a CSV file with languages and a column '{COLUMNS[by][0]}' or '{COLUMNS[by][1]}'"
        raise UserError(f"proportion.table={path}: wanted {wanted}, found {error or 'none'}") from error


def chosen(job: Job, rows: Iterable[Document | Drop], counts: Counter[str]) -> Iterator[Document | Drop]:
    """The rows whose documents the budget takes; the others are counted."""
    if job.config.budget is None:
        yield from rows
        return
    thresholds = {name: part["threshold"] for name, part in job.read_facts("choose")["chosen"].items()}
    for row in rows:
        if isinstance(row, Drop):
            yield row
        elif job.plan["shares"] is not None and row.language not in job.plan["shares"]:
            yield drop(row, "unknown language", row.language)
        # A language without a threshold had no document that passes the screen: let that tell why.
        elif bin_of(job.config.seed, row.id) < thresholds.get(row.language, BINS):
            yield row
        else:
            counts["not chosen"] += 1
