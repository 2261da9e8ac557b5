"""The phases of data preparation: functions of a job and a task number, run in this order.

    sign, match, cluster    near-duplicates, where they are to go
    measure                 a part's files, bytes and tokens by language, where there is a budget
    choose                  the thresholds that meet the budget
    encode                  a part's documents as ids, in runs sorted by hash
    tally                   totals, and whether too much was unreadable
    pack                    a range of hashes as one shard
    count, merge, select    the n-gram table, unless it is switched off

and `finish`, which makes the result visible. Nothing that a task writes depends on which worker ran it, or on
how many there are.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf import UserError
from conf.files import read_result
from conf.fingerprint import fingerprint_file
from conf.stage import BEGUN, publish, write_manifest
from data_prep.document import Document, Drop, in_words, is_held_out, order, split
from data_prep.encode import encode
from data_prep.job import INDEX, WORK, Job, Phase, one_task
from data_prep.ngram_tasks import (
    count_unit,
    merge_range,
    range_count,
    select,
    units,
    wants_table,
)
from data_prep.ngrams import TABLE
from data_prep.packing import Encoded, pack
from data_prep.runs import (
    TEXTS,
    HeldOutWriter,
    RunWriter,
    merge_held_out,
    read_runs,
    token_dtype,
)
from data_prep.selection import (
    BUCKETS,
    choose_documents,
    chosen,
    cluster,
    match,
    measure,
    sign,
    unique,
)
from data_prep.shards import SPLITS, ShardWriter
from data_prep.sources import UNREADABLE

DROPS = "drops.jsonl"
LANGUAGES = 2**16
DOCUMENT_TOKENS = 256  # what a document counts for beside its tokens, when shards are sized for memory


def encode_part(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Encode a part's documents, and set aside what is dropped and what is held out."""
    config = job.config
    counts = Counter[str]()
    drops = Counter[str]()
    rows = unique(job, part, chosen(job, _counted(job.rows(part), counts), counts))
    writers = {
        name: RunWriter(folder / name, token_dtype(job.vocab.size)) for name in SPLITS
    }
    totals: dict[str, dict[str, Any]] = {
        name: {"modes": Counter(), "languages": {}} for name in SPLITS
    }
    languages: dict[str, int] = {}
    with (
        open(folder / DROPS, "w", encoding="utf-8", errors="backslashreplace") as file,
        HeldOutWriter(folder) as held_out,
    ):
        documents = _pieces(job, _set_aside(job.screened(rows), drops, file), counts)
        for document, mode, ids in encode(documents, config, job.vocab, job.encoder):
            name = "held_out" if document.held_out else "train"
            key = order(document.id, seed=config.seed)
            language = languages.setdefault(document.language, len(languages))
            if language == LANGUAGES:
                raise UserError(
                    f"data.language must have at most {LANGUAGES:,} values, got more"
                )
            writers[name].add(key, Encoded(document.id, language, mode, ids))
            totals[name]["modes"][mode.name] += 1
            sums = totals[name]["languages"].setdefault(document.language, Counter())
            sums.update(documents=1, bytes=len(document.text.encode()), tokens=len(ids))
            if document.held_out:
                held_out.add(key, document)
    for name, writer in writers.items():
        totals[name]["bounds"] = writer.close()
    return {"counts": counts, "drops": drops, "languages": list(languages), **totals}


def _counted(
    rows: Iterable[Document | Drop], counts: Counter[str]
) -> Iterator[Document | Drop]:
    for row in rows:
        counts["broken files" if row.row is None else "rows"] += 1
        yield row


def _set_aside(
    rows: Iterable[Document | Drop], drops: Counter[str], file: Any
) -> Iterator[Document]:
    """Yield the documents among the rows; the others are counted and written to the file."""
    for row in rows:
        if isinstance(row, Document):
            yield row
        else:
            drops[row.reason] += 1
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def _pieces(
    job: Job, documents: Iterable[Document], counts: Counter[str]
) -> Iterator[Document]:
    """Yield documents as they are encoded, whole or in pieces; those that spell a control piece are counted."""
    for document in documents:
        counts["documents"] += 1
        counts["documents with control pieces"] += job.encoder.spells_control(
            document.text
        )
        # By file, so that no part of a held-out file is ever trained on.
        held_out = is_held_out(
            document.id, seed=job.config.seed, share=job.plan["held_out"]
        )
        yield from split(
            replace(document, held_out=held_out), job.config.data.split_chars
        )


def tally(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Return totals over all parts. Raises UserError when too much was unreadable or nothing is left."""
    counts = Counter[str]()
    drops = Counter[str]()
    splits: dict[str, dict[str, Any]] = {
        name: {"modes": Counter(), "languages": {}} for name in SPLITS
    }
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
        sizes = (
            sums["tokens"] + DOCUMENT_TOKENS * sums["documents"]
            for sums in total["languages"].values()
        )
        total["shards"] = -(-sum(sizes) // job.config.shard_tokens)
    languages = sorted(
        {language for total in splits.values() for language in total["languages"]}
    )
    if not languages:
        raise UserError(
            f"data.path={job.config.data.path} must have documents to train on, got {in_words(drops)}"
        )
    return {
        "counts": counts,
        "drops": dict(sorted(drops.items())),
        "languages": languages,
        **splits,
    }


def _check_readable(job: Job, counts: Counter[str], drops: Counter[str]) -> None:
    limit = job.config.max_unreadable
    files = sum(len(part.files) for part in job.parts)
    rows = sum(drops[reason] for reason in UNREADABLE) - counts["broken files"]
    for kind, broken, total in (
        ("rows", rows, counts["rows"]),
        ("files", counts["broken files"], files),
    ):
        if broken > limit * total:
            raise UserError(
                f"data.path={job.config.data.path} must have at most {limit:.1%} of {kind} unreadable "
                f"(max_unreadable), got {broken} of {total}. See {job.work}/encode/*/{DROPS}"
            )


def pack_shard(job: Job, task: int, folder: Path) -> dict[str, Any]:
    """Pack the documents of one range of keys into one shard."""
    config = job.config
    totals = job.read_facts("tally")
    shards = [
        (name, index) for name in SPLITS for index in range(totals[name]["shards"])
    ]
    name, index = shards[task]
    count = totals[name]["shards"]
    low, high = (2**64 * bound // count for bound in (index, index + 1))
    dtype = token_dtype(job.vocab.size)
    keyed: list[tuple[int, Encoded]] = []
    for part in range(len(job.parts)):
        facts = job.read_facts("encode", part)
        languages = [
            totals["languages"].index(language) for language in facts["languages"]
        ]
        stem = job.done("encode", part) / name
        for key, document in read_runs(stem, facts[name]["bounds"], dtype, low, high):
            keyed.append(
                (key, replace(document, language=languages[document.language]))
            )
    if not keyed:  # one document may be larger than a shard
        return {"split": name, "sequences": 0, "tokens": 0}
    keyed.sort(key=lambda pair: pair[0])
    stem = folder / f"{name}-{index:05d}"
    writer = ShardWriter(
        stem, seq_len=config.seq_len, dtype=dtype, padding=job.vocab.eos
    )
    for packed in pack((document for _, document in keyed), config.seq_len):
        writer.add(packed)
    return {"split": name, **writer.close()}


def shard_count(job: Job) -> int:
    """Return the number of shards of all splits together."""
    totals = job.read_facts("tally")
    return sum(totals[name]["shards"] for name in SPLITS)


def finish(job: Job) -> None:
    """Write what belongs to all tasks together, the manifest last, and make the folder visible."""
    totals = job.read_facts("tally")
    packed = [job.read_facts("pack", task) for task in range(shard_count(job))]
    packed = [shard for shard in packed if shard["sequences"]]
    facts: dict[str, Any] = {
        "vocab": job.vocab.to_json(),
        "seq_len": job.config.seq_len,
        "languages": totals["languages"],
        "counts": totals["counts"],
        "drops": totals["drops"],
        "decontamination": fingerprint_file(job.folder / INDEX),
        "decontaminated": list(job.config.decontaminate.benchmarks),
    }
    if job.config.budget is not None:
        facts["chosen"] = job.read_facts("choose")["chosen"]
    for name in SPLITS:
        facts[name] = _split_facts(
            totals[name], [shard for shard in packed if shard["split"] == name], job
        )
    results = [
        path
        for task in range(shard_count(job))
        for path in job.done("pack", task).glob("*.npy")
    ]
    if wants_table(job):
        facts["ngrams"] = job.read_facts("select")
        results += job.done("select").glob(TABLE)
    for path in results:
        os.replace(path, job.folder / path.name)
    encoded = [job.done("encode", part) for part in range(len(job.parts))]
    merge_held_out(encoded, job.folder / TEXTS)
    with open(job.folder / DROPS, "wb") as out:
        for folder in encoded:
            with open(folder / DROPS, "rb") as file:
                shutil.copyfileobj(file, out)
    write_manifest(job.folder, "shards", read_result(job.folder / BEGUN), **facts)
    # Another run that meets the finished folder removes it too.
    shutil.rmtree(publish(job.folder) / WORK, ignore_errors=True)


def _split_facts(
    total: dict[str, Any], shards: list[dict[str, Any]], job: Job
) -> dict[str, Any]:
    sequences, tokens = (
        sum(shard[name] for shard in shards) for name in ("sequences", "tokens")
    )
    return {
        "documents": sum(sums["documents"] for sums in total["languages"].values()),
        "modes": dict(sorted(total["modes"].items())),
        "languages": total["languages"],
        "sequences": sequences,
        "tokens": tokens,
        "filled": round(tokens / (sequences * job.config.seq_len), 4)
        if sequences
        else 0.0,
        "shards": [
            {name: shard[name] for name in ("sequences", "tokens", "sums")}
            for shard in shards
        ],
    }


def _part_count(job: Job) -> int:
    return len(job.parts)


PHASES = (
    Phase("sign", _part_count, sign, lambda job: job.config.near_duplicates),
    Phase("match", lambda job: BUCKETS, match, lambda job: job.config.near_duplicates),
    Phase("cluster", one_task, cluster, lambda job: job.config.near_duplicates),
    Phase("measure", _part_count, measure, lambda job: job.config.budget is not None),
    Phase(
        "choose", one_task, choose_documents, lambda job: job.config.budget is not None
    ),
    Phase("encode", _part_count, encode_part),
    Phase("tally", one_task, tally),
    Phase("pack", shard_count, pack_shard),
    Phase("count", lambda job: len(units(job)), count_unit, wants_table),
    Phase("merge", range_count, merge_range, wants_table),
    Phase("select", one_task, select, wants_table),
)
