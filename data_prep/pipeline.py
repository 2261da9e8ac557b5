"""Prepare data: a plan, the phases of data_prep.phases, the result made visible."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.runs.files import write_json
from conf.runs.fingerprint import fingerprint_file, fingerprint_files
from conf.runs.stage import (
    check_out,
    collect_provenance,
    commit,
    is_finished,
    start_run,
)
from data_prep.chat import ChatTemplate
from data_prep.config import DataPrepConfig
from data_prep.document import held_out_share
from data_prep.encode import Encoder
from data_prep.executors import refuse_while_queued, run_local, submit_slurm
from data_prep.filters import entries, index_entries, sources_hash
from data_prep.job import INDEX, PLAN, WORK, Job
from data_prep.listing import REMOTE, InputPart, list_parts
from data_prep.phases import finish
from data_prep.selection import read_table
from data_prep.vocab import (
    FILES,
    TOKENIZER,
    copy_tokenizer,
    find_vocab,
    load_tokenizer,
    tokenizer_file,
)

# Settings that do not change the result.
CHANGEABLE = ("executor", "workers", "slurm", "max_unreadable")
# Data that is compared by content: seconds of a core, and one read of the disk.
CONTENT_BYTES = 2**34
LEAST_HELD_OUT = 4  # source files, but at most a fifth of them


def prepare(config: DataPrepConfig) -> str | None:
    """Make the folder `config.out`; return a remark for the user if it is not made.

    An interrupted preparation goes on where it stopped. Raises UserError, and leaves
    nothing visible, for anything that makes a result impossible, and for a preparation
    that was begun with other settings, files or commit of this project.
    """
    out = Path(config.out)
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(config.data.path)):
        raise UserError(
            f"out={out} must be a folder outside of data.path={config.data.path}, got "
            "one within"
        )
    check_out(out)
    parts, place = list_parts(config.data)
    facts = _facts(config, parts, place)
    if is_finished(out, "shards", facts):
        # A run that was killed right at its end leaves this.
        shutil.rmtree(out / WORK, ignore_errors=True)
        return "is finished: nothing to do"
    refuse_while_queued(config.out)
    # An unfinished run can be continued by the same code alone.
    with start_run(out, {**facts, "commit": commit()}) as folder:
        job = Job(config, folder)
        if not (folder / PLAN).is_file():
            _plan(job, parts, place)
        if config.executor == "slurm":
            return f"will be made by Slurm, last by job {submit_slurm(job)}"
        run_local(job)
        finish(job)
    return None


def _facts(
    config: DataPrepConfig, parts: list[InputPart], place: str
) -> dict[str, Any]:
    """Return what determines the result: settings, and contents of the files they name."""
    facts = collect_provenance(config, {}, ignore=CHANGEABLE)
    inputs = facts["inputs"]
    inputs["data.path"] = _data_fingerprint(parts, place)
    inputs["decontaminate"] = sources_hash(config.decontaminate)
    if place.startswith(REMOTE):
        inputs["commit"] = place.rpartition("@")[2]
    tokenizer_file(config.tokenizer)
    for name in ("config.json", "generation_config.json", *FILES):
        if (path := Path(config.tokenizer) / name).is_file():
            inputs[f"tokenizer/{name}"] = fingerprint_file(path)
    if config.proportion.table is not None:
        read_table(config)
        inputs["proportion.table"] = fingerprint_file(Path(config.proportion.table))
    return facts


def _data_fingerprint(parts: list[InputPart], place: str) -> str:
    """Return a hash of the data: of its files' content, so that a copy is the same data.

    More than CONTENT_BYTES count by names, sizes and times; data of the hub count by
    names and sizes, beside the commit.
    """
    files = [(name, Path(place) / name) for part in parts for name in part.files]
    remote = place.startswith(REMOTE)
    if not remote and sum(part.size for part in parts) <= CONTENT_BYTES:
        return fingerprint_files(files)
    times = [] if remote else [path.stat().st_mtime_ns for _, path in files]
    listed = [[[part.files, part.size] for part in parts], times]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _plan(job: Job, parts: list[InputPart], place: str) -> None:
    """Write the tools that every task needs into the folder, and then the plan."""
    config = job.config
    folder = job.folder
    held_out = config.held_out
    if config.data.kind == "source":
        files = [file for part in parts for file in part.files]
        held_out = held_out_share(
            files, seed=config.seed, share=held_out, least=LEAST_HELD_OUT
        )
    tokenizer = load_tokenizer(config.tokenizer)
    vocab = find_vocab(tokenizer, config.vocab, model=config.tokenizer)
    encoder = Encoder(tokenizer, vocab)
    encoder.check()
    if config.data.messages:
        ChatTemplate(Path(config.tokenizer), encoder)  # refuses a folder without one
    index = index_entries(entries(config.decontaminate))
    plan = {
        "place": place,
        "parts": [asdict(part) for part in parts],
        "vocab": vocab.to_json(),
        "shares": read_table(config) if config.proportion.table else None,
        "held_out": held_out,
    }
    copy_tokenizer(config.tokenizer, folder / TOKENIZER)
    write_json(folder / INDEX, index)
    write_json(folder / PLAN, plan)
