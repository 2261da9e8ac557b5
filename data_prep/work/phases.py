"""The phases of data preparation: functions of a job and a task number, run in this order.

    sign, match, cluster    near-duplicates, where they are to go
    measure                 a part's files, bytes and tokens by language, where there is a budget
    choose                  the thresholds that meet the budget
    encode                  a part's documents as ids, in runs sorted by hash
    tally                   totals, and whether too much was unreadable
    pack                    a range of hashes as one shard
    count, merge, select    the n-gram table, unless it is switched off

Each task writes into a folder of its own, its facts last, which then gets the task's name:
a task with a folder is finished and never runs again, and two copies of it do no harm.
Nothing that a task writes depends on which worker ran it, or on how many there are.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from conf import UserError
from conf.files import write_json
from conf.stage import lock
from data_prep.document import Document, Drop, drop_counts, is_held_out, order, split
from data_prep.encode.documents import encode
from data_prep.held_out import HeldOutWriter
from data_prep.packing import Encoded, pack
from data_prep.runs import RunWriter, read_runs, token_dtype
from data_prep.shards import SPLITS, ShardWriter
from data_prep.sources import UNREADABLE
from data_prep.work.budget import choose_documents, chosen, measure
from data_prep.work.job import FACTS, Job
from data_prep.work.near_duplicates import BUCKETS, cluster, match, sign, unique
from data_prep.work.ngram_table import count_unit, merge_range, range_count, select, unit_count, wants_table

DROPS = "drops.jsonl"
LANGUAGES = 2**16
DOCUMENT_TOKENS = 256  # what a document counts for beside its tokens, when shards are sized for memory


@dataclass(frozen=True)
class Phase:
    """A step that all tasks of the one before must have ended; `run` is given a folder to write into."""

    name: str
    tasks: Callable[[Job], int]
    run: Callable[[Job, int, Path], dict[str, Any]]
    wanted: Callable[[Job], bool] = lambda job: True

    @property
    def single(self) -> bool:
        """Whether it is always one task."""
        return self.tasks is _one


def run_task(job: Job, phase: Phase, task: int) -> None:
    """Run one task, unless it has been run."""
    done = job.done(phase.name, task)
    if done.is_dir():
        return
    attempt = done.with_name(f".{done.name}.{uuid4().hex}")
    attempt.mkdir(parents=True)
    held = lock(attempt, attempt)
    try:
        write_json(attempt / FACTS, phase.run(job, task, attempt))
        try:
            attempt.rename(done)
        except OSError:
            if not done.is_dir():
                raise
            shutil.rmtree(attempt)  # another copy of the task was faster
    finally:
        os.close(held)


def sweep(job: Job) -> None:
    """Remove what tasks have left that were killed: on every restart they would leave as much again."""
    for attempt in job.work.glob("*/.*"):
        try:
            held = lock(attempt, attempt)
        except UserError:  # of a worker that has not yet noticed that its run was killed
            continue
        shutil.rmtree(attempt)
        os.close(held)


def encode_part(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Encode a part's documents, and set aside what is dropped and what is held out."""
    config = job.config
    counts: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    rows = unique(job, part, chosen(job, _counted(job.rows(part), counts), counts))
    writers = {name: RunWriter(folder / name, token_dtype(job.vocab.size)) for name in SPLITS}
    totals: dict[str, dict[str, Any]] = {name: {"modes": Counter(), "languages": {}} for name in SPLITS}
    names: dict[str, int] = {}
    with (
        open(folder / DROPS, "w", encoding="utf-8", errors="backslashreplace") as file,
        HeldOutWriter(folder) as held_out,
    ):
        pieces = _pieces(job, _set_aside(job.screened(rows), drops, file), counts)
        for document, mode, ids in encode(pieces, config, job.vocab, job.encoder):
            name = "held_out" if document.held_out else "train"
            key = order(document.id, seed=config.seed)
            language = _number(document.language, names)
            writers[name].add(key, Encoded(document.id, language, mode, ids))
            totals[name]["modes"][mode.name] += 1
            sums = totals[name]["languages"].setdefault(
                document.language, {"documents": 0, "bytes": 0, "tokens": 0}
            )
            sums["documents"] += 1
            sums["bytes"] += len(document.text.encode())
            sums["tokens"] += len(ids)
            if document.held_out:
                held_out.add(key, document)
    for name, writer in writers.items():
        totals[name]["bounds"] = writer.close()
    return {"counts": counts, "drops": drops, "languages": list(names), **totals}


def _counted(rows: Iterable[Document | Drop], counts: Counter[str]) -> Iterator[Document | Drop]:
    for row in rows:
        whole_file = isinstance(row, Drop) and row.row is None
        counts["broken files" if whole_file else "rows"] += 1
        yield row


def _set_aside(rows: Iterable[Document | Drop], drops: Counter[str], file: Any) -> Iterator[Document]:
    """The documents among the rows; the others are counted and written to the file."""
    for row in rows:
        if isinstance(row, Document):
            yield row
        else:
            drops[row.reason] += 1
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def _number(language: str, names: dict[str, int]) -> int:
    """The language's index. Raises UserError when there are more than a shard can tell apart."""
    if language not in names and len(names) == LANGUAGES:
        raise UserError(f"data.language: wanted at most {LANGUAGES:,} languages, found more: {language!r}")
    return names.setdefault(language, len(names))


def _pieces(job: Job, documents: Iterable[Document], counts: Counter[str]) -> Iterator[Document]:
    """Documents as they are encoded, whole or in pieces; those that spell a control piece are counted."""
    for document in documents:
        counts["documents"] += 1
        counts["documents with control pieces"] += job.encoder.spells_control(document.text)
        # By file, so that no part of a held-out file is ever trained on.
        held_out = is_held_out(document.id, seed=job.config.seed, share=job.plan["held_out"])
        yield from split(replace(document, held_out=held_out), job.config.data.split_chars)


def tally(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Totals over all parts. Raises UserError when too much was unreadable or nothing is left."""
    counts: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    splits: dict[str, dict[str, Any]] = {name: {"modes": Counter(), "languages": {}} for name in SPLITS}
    for part in range(len(job.parts)):
        facts = job.read_facts("encode", part)
        counts.update(facts["counts"])
        drops.update(facts["drops"])
        for name, total in splits.items():
            total["modes"].update(facts[name]["modes"])
            for language, sums in facts[name]["languages"].items():
                total["languages"].setdefault(language, Counter()).update(sums)
    _check_readable(job, counts, drops)
    for total in splits.values():
        total["languages"] = dict(sorted(total["languages"].items()))
        sizes = (sums["tokens"] + DOCUMENT_TOKENS * sums["documents"] for sums in total["languages"].values())
        total["shards"] = -(-sum(sizes) // job.config.shard_tokens)
    languages = sorted({language for total in splits.values() for language in total["languages"]})
    if not languages:
        raise UserError(
            f"data.path={job.config.data.path}: wanted documents to train on, found {drop_counts(drops)}"
        )
    return {"counts": counts, "drops": dict(sorted(drops.items())), "languages": languages, **splits}


def _check_readable(job: Job, counts: Counter[str], drops: Counter[str]) -> None:
    limit = job.config.max_unreadable
    files = sum(len(part.files) for part in job.parts)
    rows = sum(drops[reason] for reason in UNREADABLE) - counts["broken files"]
    for kind, broken, total in (("rows", rows, counts["rows"]), ("files", counts["broken files"], files)):
        if broken > limit * total:
            raise UserError(
                f"data.path={job.config.data.path}: wanted at most {limit:.1%} of {kind} unreadable "
                f"(max_unreadable), found {broken} of {total}: see {job.work}/encode/*/{DROPS}"
            )


def pack_shard(job: Job, task: int, folder: Path) -> dict[str, Any]:
    """Pack the documents of one range of keys into one shard."""
    config, totals = job.config, job.read_facts("tally")
    shards = [(name, index) for name in SPLITS for index in range(totals[name]["shards"])]
    name, index = shards[task]
    count = totals[name]["shards"]
    low, high = (2**64 * bound // count for bound in (index, index + 1))
    dtype = token_dtype(job.vocab.size)
    encoded: list[tuple[int, Encoded]] = []
    for part in range(len(job.parts)):
        facts = job.read_facts("encode", part)
        languages = [totals["languages"].index(language) for language in facts["languages"]]
        stem = job.done("encode", part) / name
        for key, document in read_runs(stem, facts[name]["bounds"], dtype, low, high):
            encoded.append(
                (key, Encoded(document.id, languages[document.language], document.mode, document.ids))
            )
    if not encoded:  # one document may be larger than a shard
        return {"split": name, "sequences": 0, "tokens": 0}
    encoded.sort(key=lambda keyed: keyed[0])
    writer = ShardWriter(
        folder / f"{name}-{index:05d}", seq_len=config.seq_len, dtype=dtype, padding=job.vocab.eos
    )
    for packed in pack((document for _, document in encoded), config.seq_len):
        writer.add(packed)
    return {"split": name, **writer.close()}


def shard_count(job: Job) -> int:
    """Shards of all splits together."""
    totals = job.read_facts("tally")
    return sum(totals[name]["shards"] for name in SPLITS)


def _parts(job: Job) -> int:
    return len(job.parts)


def _one(job: Job) -> int:
    return 1


def _has_budget(job: Job) -> bool:
    return job.config.budget is not None


def _drops_duplicates(job: Job) -> bool:
    return job.config.near_duplicates


PHASES = (
    Phase("sign", _parts, sign, _drops_duplicates),
    Phase("match", lambda job: BUCKETS, match, _drops_duplicates),
    Phase("cluster", _one, cluster, _drops_duplicates),
    Phase("measure", _parts, measure, _has_budget),
    Phase("choose", _one, choose_documents, _has_budget),
    Phase("encode", _parts, encode_part),
    Phase("tally", _one, tally),
    Phase("pack", shard_count, pack_shard),
    Phase("count", unit_count, count_unit, wants_table),
    Phase("merge", range_count, merge_range, wants_table),
    Phase("select", _one, select, wants_table),
)


def phase_named(name: str) -> Phase:
    """The phase of this name."""
    return next(phase for phase in PHASES if phase.name == name)
