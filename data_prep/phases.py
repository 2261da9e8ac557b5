"""The phases of data preparation: functions of a job and a task number, in this order.

    sign, match, cluster    find near-duplicates, if near_duplicates is set
    measure                 count a part's files, bytes and tokens by language, for a budget
    choose                  choose thresholds that meet the budget
    encode                  encode a part's documents, in runs sorted by hash
    tally                   add up totals; end the run if too much was unreadable
    pack                    pack a range of hashes into one shard
    count, merge, select    make the n-gram table, unless ngrams.megabytes is 0

Last, `finish` publishes the result. The output of a task depends neither on the worker nor on
the number of workers.
"""

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from conf.errors import UserError, counted
from conf.runs.files import read_result
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import RUN_RECORD, publish, write_manifest
from data_prep.document import (
    DROPS,
    Document,
    Drop,
    format_counts,
    held_out_number,
    order,
    split,
)
from data_prep.encode import encode
from data_prep.job import INDEX, WORK, Job, Phase
from data_prep.ngram_tasks import (
    count_slice,
    merge_range,
    needs_table,
    range_count,
    select,
    slices,
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
    apply_budget,
    choose_documents,
    cluster,
    drop_near_duplicates,
    match,
    measure,
    sign,
)
from data_prep.shards import MOST_LANGUAGES, SPLITS, ShardWriter
from data_prep.sources import UNREADABLE

# What the user can do if most rows are dropped, by reason.
CURES = {
    "": "The files are empty: give other files.",  # no row was dropped
    "unreadable file": "Download the file again, or set max_unreadable=1 to use the rows that "
    "were read.",
    "undecodable": "Convert the files to UTF-8.",
    "line too large": "Raise data.max_bytes.",
    "too large": "Raise data.max_bytes.",
    "empty": "Give files with text, or the column with the text: data.text=NAME.",
    "mean line too long": "Raise filters.mean_line.",
    "line too long": "Raise filters.longest_line.",
    "too few alphanumerics": "Lower filters.alphanumeric.",
    "unknown language": "Spell the languages of proportion.table as in the data, or correct "
    "data.language.",
    "missing column": "Name the column: data.text=NAME for documents, data=chat "
    "data.messages=NAME for conversations.",
    "malformed row": "Write one JSON object per line, or a JSON list of objects.",
    "unusable conversation": "Correct the messages, or name their column: "
    "data.messages=NAME.",
    "chat template": "Use the tokenizer of a chat model with a template that renders these "
    "messages.",
    "no answer to train on": "Give an answer a weight other than 0.",
    "empty answer": "Write a text into the answers.",
}
DOCUMENT_TOKENS = 256  # memory of a document without its ids, in tokens


def encode_part(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Encode a part's documents; write drops and held-out texts to separate files."""
    counts: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    dtype = token_dtype(job.vocab.size)
    writers = {name: RunWriter(folder / name, dtype) for name in SPLITS}
    totals = {name: _no_documents() for name in SPLITS}
    languages: dict[str, int] = {}
    rows = apply_budget(job, _counted(job.rows(part), counts), counts)
    rows = drop_near_duplicates(job, part, rows)
    with (
        open(folder / DROPS, "w", encoding="utf-8", errors="backslashreplace") as file,
        HeldOutWriter(folder) as held_out,
    ):
        documents = _write_drops(job.screen(rows), drops, file)
        pieces = _pieces(job, documents, counts)
        for document, mode, ids in encode(pieces, job.config, job.encoder):
            name = "held_out" if document.held_out else "train"
            key = order(document.id, seed=job.config.seed)
            language = languages.setdefault(document.language, len(languages))
            prompt = document.turns[0].prompt if document.turns else 0
            encoded = Encoded(document.id, language, mode, ids, prompt)
            writers[name].add(key, encoded)
            totals[name]["modes"][mode.name] += 1
            sums = totals[name]["languages"][document.language]
            sums.update(documents=1, bytes=len(document.text.encode()), tokens=len(ids))
            if document.held_out:
                held_out.add(key, document)
    for name, writer in writers.items():
        totals[name]["bounds"] = writer.close()
    return {"counts": counts, "drops": drops, "languages": list(languages), **totals}


def _no_documents() -> dict[str, Any]:
    return {"modes": Counter(), "languages": defaultdict(Counter)}


def _counted(
    rows: Iterable[Document | Drop], counts: Counter[str]
) -> Iterator[Document | Drop]:
    for row in rows:
        if row.row is not None:
            counts["rows"] += 1
        elif isinstance(row, Drop) and row.reason in UNREADABLE:
            counts["broken files"] += 1
        yield row


def _write_drops(
    rows: Iterable[Document | Drop], drops: Counter[str], file: TextIO
) -> Iterator[Document]:
    """Yield the documents; count the drops and write them to `file`."""
    for row in rows:
        if isinstance(row, Document):
            yield row
        else:
            drops[row.reason] += 1
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def _pieces(
    job: Job, documents: Iterable[Document], counts: Counter[str]
) -> Iterator[Document]:
    """Yield the pieces of the documents; count documents that spell a control piece."""
    for document in documents:
        counts["documents"] += 1
        spells_control = job.encoder.spells_control(document.text)
        counts["documents with control pieces"] += spells_control
        # Held out before splitting, so that no piece of a held-out document is trained on.
        number = held_out_number(document, seed=job.config.seed)
        document = replace(document, held_out=number < job.plan["held_out"])
        yield from split(document, job.config.data.split_chars)


def tally(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Return totals over all parts.

    Raises UserError if too much was unreadable, no document is left, or the data has too many
    languages.
    """
    counts: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    totals = {name: _no_documents() for name in SPLITS}
    for part in range(len(job.parts)):
        facts = job.read_facts("encode", part)
        counts.update(facts["counts"])
        drops.update(facts["drops"])
        for name, total in totals.items():
            total["modes"].update(facts[name]["modes"])
            for language, sums in facts[name]["languages"].items():
                total["languages"][language].update(sums)
    encoded = sum(
        sums["documents"]
        for total in totals.values()
        for sums in total["languages"].values()
    )
    _check_readable(job, counts, drops, encoded)
    for total in totals.values():
        total["languages"] = dict(sorted(total["languages"].items()))
        sizes = (
            sums["tokens"] + DOCUMENT_TOKENS * sums["documents"]
            for sums in total["languages"].values()
        )
        total["shards"] = -(-sum(sizes) // job.config.shard_tokens)
    names = {name for total in totals.values() for name in total["languages"]}
    if len(names) > MOST_LANGUAGES:
        raise UserError(
            f"data.language={job.config.data.language} must give at most {MOST_LANGUAGES:,} "
            f"languages, got {len(names):,}. Name a column with fewer values, and use another "
            f"out= or delete {job.work.parent}"
        )
    return {
        "counts": counts,
        "drops": dict(sorted(drops.items())),
        "languages": sorted(names),
        **totals,
    }


def _check_readable(
    job: Job, counts: Counter[str], drops: Counter[str], encoded: int
) -> None:
    if not encoded and counts["not chosen"]:
        raise UserError(
            f"budget must be large enough for a document, got {job.config.budget}, which chooses "
            f"0 of {counted(counts['not chosen'], 'document')}. Raise budget, and use another "
            f"out= or delete {job.work.parent}"
        )
    limit = job.config.max_unreadable
    files = sum(len(part.files) for part in job.parts)
    broken_files = counts["broken files"]
    broken_rows = sum(drops[reason] for reason in UNREADABLE) - broken_files
    # The chat template may refuse documents that have passed the filters.
    refused = drops["chat template"] > limit * (
        counts["documents"] + drops["chat template"]
    )
    broken = broken_rows > limit * counts["rows"] or broken_files > limit * files
    if broken or refused or not encoded:
        causes = [name for name in drops if not broken or name in UNREADABLE]
        reason = max(causes, key=lambda name: drops[name], default="")
        sentences = (
            f"data.path={job.config.data.path} must have documents, with at most "
            f"{limit:.1%} of rows and of files unreadable (max_unreadable), got "
            f"{broken_rows} of {counted(counts['rows'], 'row')} and {broken_files} of "
            f"{counted(files, 'file')} unreadable; drops: {format_counts(drops)}.",
            _example(job, reason),
            CURES.get(reason, ""),
            f"See {job.work}/encode/*/{DROPS}. After a change, except of max_unreadable, use "
            f"another out= or delete {job.folder}",
        )
        raise UserError(" ".join(filter(None, sentences)))


def _example(job: Job, reason: str) -> str:
    """Return the first drop of a reason as a sentence."""
    for part in range(len(job.parts)):
        with open(job.done("encode", part) / DROPS, "rb") as file:
            for line in file:
                drop = json.loads(line)
                if drop["reason"] == reason:
                    row = "" if drop["row"] is None else f", row {drop['row']}"
                    detail = f": {drop['detail']}" if drop["detail"] else ""
                    return f"First {reason}: {drop['file']}{row}{detail}."
    return ""


def pack_shard(job: Job, task: int, folder: Path) -> dict[str, Any]:
    """Pack the documents of a range of keys into a shard."""
    totals = job.read_facts("tally")
    shards = [
        (name, index) for name in SPLITS for index in range(totals[name]["shards"])
    ]
    name, index = shards[task]
    low, high = (
        2**64 * bound // totals[name]["shards"] for bound in (index, index + 1)
    )
    dtype = token_dtype(job.vocab.size)
    keyed: list[tuple[int, Encoded]] = []
    for part in range(len(job.parts)):
        facts = job.read_facts("encode", part)
        languages = [totals["languages"].index(own) for own in facts["languages"]]
        stem = job.done("encode", part) / name
        for key, document in read_runs(stem, facts[name]["bounds"], dtype, low, high):
            document = replace(document, language=languages[document.language])
            keyed.append((key, document))
    if not keyed:  # the range has no document, since one document may exceed a shard
        return {"split": name, "sequences": 0, "tokens": 0}
    keyed.sort(key=lambda pair: pair[0])
    seq_len = job.config.seq_len
    stem = folder / f"{name}-{index:05d}"
    writer = ShardWriter(stem, seq_len=seq_len, dtype=dtype, padding=job.vocab.eos)
    for packed in pack((document for _, document in keyed), seq_len):
        writer.add(packed)
    return {"split": name, **writer.close()}


def shard_count(job: Job) -> int:
    """Return the total number of shards of all splits."""
    totals = job.read_facts("tally")
    return sum(totals[name]["shards"] for name in SPLITS)


def finish(job: Job) -> None:
    """Move the results into the folder, write the manifest, and publish the folder."""
    results: list[Path] = []
    shards: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS}
    for task in range(shard_count(job)):
        shard = job.read_facts("pack", task)
        results += job.done("pack", task).glob("*.npy")
        if shard["sequences"]:
            shards[shard.pop("split")].append(shard)
    facts = _manifest_facts(job, shards)
    if needs_table(job):
        facts["ngrams"] = job.read_facts("select")
        results += job.done("select").glob(TABLE)
    # Files that a killed run has moved already are not in `results`.
    for path in results:
        os.replace(path, job.folder / path.name)
    encoded = [job.done("encode", part) for part in range(len(job.parts))]
    merge_held_out(encoded, job.folder / TEXTS)
    with open(job.folder / DROPS, "wb") as out:
        for folder in encoded:
            with open(folder / DROPS, "rb") as file:
                shutil.copyfileobj(file, out)
    write_manifest(job.folder, "shards", read_result(job.folder / RUN_RECORD), **facts)
    # If this run is killed here, the next run removes the work folder.
    shutil.rmtree(publish(job.folder) / WORK, ignore_errors=True)


def _manifest_facts(
    job: Job, shards: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    totals = job.read_facts("tally")
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
        budget = job.read_facts("choose")
        facts["chosen"] = budget["chosen"]
        # Older runs have neither.
        facts["without_data"] = budget.get("without_data", [])
        facts["unlisted"] = budget.get("unlisted", [])
    for name, own in shards.items():
        languages = totals[name]["languages"]
        sequences = sum(shard["sequences"] for shard in own)
        tokens = sum(shard["tokens"] for shard in own)
        capacity = max(1, sequences * job.config.seq_len)
        facts[name] = {
            "documents": sum(sums["documents"] for sums in languages.values()),
            "modes": dict(sorted(totals[name]["modes"].items())),
            "languages": languages,
            "sequences": sequences,
            "tokens": tokens,
            "filled": round(tokens / capacity, 4),
            "shards": own,
        }
    return facts


def _part_count(job: Job) -> int:
    return len(job.parts)


def _drops_duplicates(job: Job) -> bool:
    return job.config.near_duplicates


def _has_budget(job: Job) -> bool:
    return job.config.budget is not None


PHASES = (
    Phase("sign", _part_count, sign, _drops_duplicates),
    Phase("match", BUCKETS, match, _drops_duplicates),
    Phase("cluster", 1, cluster, _drops_duplicates),
    Phase("measure", _part_count, measure, _has_budget),
    Phase("choose", 1, choose_documents, _has_budget),
    Phase("encode", _part_count, encode_part),
    Phase("tally", 1, tally),
    Phase("pack", shard_count, pack_shard),
    Phase("count", lambda job: len(slices(job)), count_slice, needs_table),
    Phase("merge", range_count, merge_range, needs_table),
    Phase("select", 1, select, needs_table),
)
