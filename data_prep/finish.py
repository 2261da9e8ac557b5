"""The last act: facts of all tasks become the manifest, rows set aside become one file each."""

import heapq
import json
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conf.stage import BEGUN, fingerprint_file, publish, write_manifest
from data_prep.job import INDEX, WORK, Job
from data_prep.phases import SPLITS, shard_count


def finish(job: Job) -> None:
    """Write what belongs to all tasks together, the manifest last, and make the folder visible."""
    totals = job.read_facts("tally")
    packed = [job.read_facts("pack", task) for task in range(shard_count(job))]
    facts: dict[str, Any] = {
        "vocab": job.vocab.to_json(),
        "seq_len": job.config.seq_len,
        "languages": totals["languages"],
        "counts": totals["counts"],
        "drops": totals["drops"],
        "decontamination": fingerprint_file(job.folder / INDEX),
    }
    if job.config.budget is not None:
        facts["chosen"] = job.read_facts("choose")
    for name in SPLITS:
        facts[name] = _split_facts(totals[name], [shard for shard in packed if shard["split"] == name], job)
    parts = range(len(job.parts))
    _merge_held_out([job.work / "encode" / f"{part:05d}.held_out.jsonl" for part in parts], job.folder)
    with open(job.folder / "drops.jsonl", "wb") as out:
        for part in parts:
            out.write((job.work / "encode" / f"{part:05d}.drops.jsonl").read_bytes())
    made = json.loads((job.folder / BEGUN).read_text(encoding="utf-8"))
    write_manifest(job.folder, "shards", made, **facts)
    shutil.rmtree(publish(job.folder) / WORK)


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
        "shards": [{"sequences": shard["sequences"], "tokens": shard["tokens"]} for shard in shards],
    }


def _merge_held_out(paths: list[Path], folder: Path) -> None:
    """The held-out documents as text, in the order of the shards: prompts for whoever measures the model."""
    with ExitStack() as stack, open(folder / "held_out.jsonl", "w", encoding="utf-8") as out:
        files = [stack.enter_context(open(path, encoding="utf-8")) for path in paths]
        for line in heapq.merge(*files):
            out.write(line[16:])  # less the key
