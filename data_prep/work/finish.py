"""The last act: facts of all tasks become the manifest, rows set aside become one file each."""

import os
import shutil
from collections import Counter
from typing import Any

from conf.fingerprint import fingerprint_file
from conf.sealed import read_result
from conf.stage import BEGUN, publish, write_manifest
from data_prep.held_out import TEXTS, merge_held_out
from data_prep.ngrams import TABLE
from data_prep.shards import SPLITS
from data_prep.work.job import INDEX, WORK, Job
from data_prep.work.ngram_table import wants_table
from data_prep.work.phases import DROPS, shard_count


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
        facts[name] = _split_facts(totals[name], [shard for shard in packed if shard["split"] == name], job)
    for task in range(shard_count(job)):
        for path in job.done("pack", task).glob("*.npy"):
            os.replace(path, job.folder / path.name)
    if wants_table(job):
        facts["ngrams"] = job.read_facts("select")
        for path in job.done("select").glob(TABLE):
            os.replace(path, job.folder / TABLE)
    encoded = [job.done("encode", part) for part in range(len(job.parts))]
    merge_held_out(encoded, job.folder / TEXTS)
    with open(job.folder / DROPS, "wb") as out:
        for folder in encoded:
            with open(folder / DROPS, "rb") as file:
                shutil.copyfileobj(file, out)
    origin = read_result(job.folder / BEGUN)
    write_manifest(job.folder, "shards", origin, **facts)
    # Another run that meets the finished folder removes it too.
    shutil.rmtree(publish(job.folder) / WORK, ignore_errors=True)


def _split_facts(total: dict[str, Any], shards: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    sequences = sum(shard["sequences"] for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    documents: Counter[str] = Counter()
    for sums in total["languages"].values():
        documents.update(sums)
    return {
        "documents": documents["documents"],
        "modes": dict(sorted(total["modes"].items())),
        "languages": total["languages"],
        "sequences": sequences,
        "tokens": tokens,
        "filled": round(tokens / (sequences * job.config.seq_len), 4) if sequences else 0.0,
        "shards": [{name: shard[name] for name in ("sequences", "tokens", "sums")} for shard in shards],
    }
