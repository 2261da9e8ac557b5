"""The budget as phases: measure every part, choose thresholds, let the chosen documents through."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from conf import UserError
from data_prep.choice import Measure, bin_of, choose, own_shares
from data_prep.document import Document, Drop, unit
from data_prep.encode import encode
from data_prep.job import Job, documents_of
from data_prep.near_duplicates import unique
from data_prep.screen import drop

SAMPLE_BYTES = 16_000_000  # of input whose tokens are counted, to know a language's tokens per byte
COLUMNS = {"bytes": ("bytes", "characters"), "files": ("files", "documents")}  # of a proportion table


def measure(job: Job, part: int) -> dict[str, Any]:
    """Count a part's documents by language and bin, as far as they pass the screen."""
    config = job.config
    found: dict[str, Measure] = {}
    rate = min(1.0, SAMPLE_BYTES / max(1, sum(part.size for part in job.parts)))
    for document in documents_of(job.screened(unique(job, part, job.rows(part)))):
        counted = found.setdefault(document.language, Measure.empty())
        size = len(document.text.encode())
        counted.files[bin_of(config.seed, document.id)] += 1
        counted.bytes[bin_of(config.seed, document.id)] += size
        if config.proportion.unit == "tokens" and unit(config.seed, "sample", document.id) < rate:
            counted.sample_tokens += sum(
                len(ids) for *_, ids in encode([document], config, job.vocab, job.encoder)
            )
            counted.sample_bytes += size
    arrays = {f"{kind}/{name}": getattr(m, kind) for name, m in found.items() for kind in ("files", "bytes")}
    np.savez_compressed(job.work / "measure" / f"{part:05d}.npz", **arrays)
    return {name: [m.sample_tokens, m.sample_bytes] for name, m in found.items()}


def choose_documents(job: Job, _: int) -> dict[str, Any]:
    """Add up what was measured and find each language's threshold."""
    config, amount = job.config, job.config.budget_amount
    assert amount is not None
    measures: dict[str, Measure] = {}
    for part in range(len(job.parts)):
        arrays = np.load(job.work / "measure" / f"{part:05d}.npz")
        for name, (tokens, size) in job.read_facts("measure", part).items():
            total = measures.setdefault(name, Measure.empty())
            total += Measure(arrays[f"files/{name}"], arrays[f"bytes/{name}"], tokens, size)
    by, table = config.proportion.by, config.proportion.table
    shares = read_table(table, by) if table else own_shares(measures, by)
    chosen = choose(measures, shares, amount=amount, by=by, unit=config.proportion.unit)
    return {name: asdict(part) for name, part in sorted(chosen.items())}


def read_table(path: str, by: str) -> dict[str, float]:
    """Languages and their sizes from a CSV file: its first column and the one of bytes or files."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        column = next(name for name in COLUMNS[by] if rows and name in rows[0])
        return {next(iter(row.values())): float(row[column]) for row in rows}
    except (OSError, ValueError, StopIteration) as error:
        wanted = f"a CSV file with languages and a column '{COLUMNS[by][0]}' or '{COLUMNS[by][1]}'"
        raise UserError(f"proportion.table={path}: wanted {wanted}, found {error or 'none'}") from error


def chosen(job: Job, rows: Iterable[Document | Drop], counts: Counter[str]) -> Iterator[Document | Drop]:
    """The rows whose documents the budget takes; the others are counted."""
    if job.config.budget is None:
        yield from rows
        return
    thresholds = {name: part["threshold"] for name, part in job.read_facts("choose").items()}
    for row in rows:
        if isinstance(row, Drop):
            yield row
        elif row.language not in thresholds:
            yield drop(row, "unknown language", row.language)
        elif bin_of(job.config.seed, row.id) < thresholds[row.language]:
            yield row
        else:
            counts["not chosen"] += 1
