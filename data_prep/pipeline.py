"""Prepare a data folder: write the plan, run the phases of data_prep.phases, publish the result."""

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
from data_prep.document import Document, held_out_number, held_out_share
from data_prep.encode import Encoder
from data_prep.executors import refuse_while_queued, run_local, submit_slurm
from data_prep.filters import benchmark_texts, benchmarks_hash, index_entries
from data_prep.job import INDEX, PLAN, WORK, Job
from data_prep.listing import REMOTE, InputPart, list_parts
from data_prep.ngram_tasks import check_size
from data_prep.phases import finish
from data_prep.selection import read_table
from data_prep.sources import read
from data_prep.vocab import (
    TOKENIZER,
    copy_tokenizer,
    find_vocab,
    load_tokenizer,
    tokenizer_file,
    tokenizer_files,
)

# Settings that do not change the result.
CHANGEABLE = ("executor", "workers", "slurm", "max_unreadable")
# Largest data that is fingerprinted by content, which takes seconds of a core and one read.
CONTENT_BYTES = 2**34
#: Smallest number of held-out source files, but at most a fifth of all.
LEAST_HELD_OUT = 4


def prepare(config: DataPrepConfig) -> str | None:
    """Write the data folder `config.out`.

    Return None, or a remark for the user if the folder was finished before or Slurm will finish it.
    An interrupted preparation is continued. Raises UserError, without publishing a folder, if
    the data cannot be prepared, or if the interrupted preparation had other settings, other
    input files or another commit of this project.
    """
    out = Path(config.out)
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(config.data.path)):
        raise UserError(
            f"out={out} must be a folder outside of data.path={config.data.path}. Use "
            "another out="
        )
    check_out(out)
    parts, root = list_parts(config.data)
    facts = _provenance(config, parts, root)
    if is_finished(out, "shards", facts):
        # Left by a run that was killed right before its end.
        shutil.rmtree(out / WORK, ignore_errors=True)
        return "is finished: nothing to do"
    refuse_while_queued(config.out)
    # Only the same version of the code can continue an unfinished run.
    with start_run(out, {**facts, "commit": commit()}) as folder:
        job = Job(config, folder)
        if not (folder / PLAN).is_file():
            _write_plan(job, parts, root)
        if config.executor == "slurm":
            return f"will be written by Slurm; the last job is {submit_slurm(job)}"
        run_local(job)
        finish(job)
    return None


def _provenance(
    config: DataPrepConfig, parts: list[InputPart], root: str
) -> dict[str, Any]:
    """Return the settings and the fingerprints of all input files, which determine the result."""
    facts = collect_provenance(config, {}, ignore=CHANGEABLE)
    inputs = facts["inputs"]
    inputs["data.path"] = _data_fingerprint(parts, root)
    inputs["decontaminate"] = benchmarks_hash(config.decontaminate)
    if root.startswith(REMOTE):
        inputs["commit"] = root.rpartition("@")[2]
    tokenizer_file(config.tokenizer)
    names = tokenizer_files(config.tokenizer)
    for name in ("config.json", "generation_config.json", *names):
        if (path := Path(config.tokenizer) / name).is_file():
            inputs[f"tokenizer/{name}"] = fingerprint_file(path)
    if config.proportion.table is not None:
        read_table(config)
        inputs["proportion.table"] = fingerprint_file(Path(config.proportion.table))
    return facts


def _data_fingerprint(parts: list[InputPart], root: str) -> str:
    """Return a hash of the data's content, so that a copy has the same fingerprint.

    For more than CONTENT_BYTES, hash the names, sizes and modification times of the files; for
    data on the hub, names and sizes, since the commit is recorded too.
    """
    files = [(name, Path(root) / name) for part in parts for name in part.files]
    remote = root.startswith(REMOTE)
    if not remote and sum(part.size for part in parts) <= CONTENT_BYTES:
        return fingerprint_files(files)
    times = [] if remote else [path.stat().st_mtime_ns for _, path in files]
    listed = [[[part.files, part.size] for part in parts], times]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _write_plan(job: Job, parts: list[InputPart], root: str) -> None:
    """Write tokenizer and index for the tasks into the folder, and then the plan."""
    config = job.config
    folder = job.folder
    held_out = config.held_out
    if config.data.kind == "source" and held_out:
        documents = (row for part in parts for row in read(part, root, config.data))
        numbers = (
            held_out_number(document, seed=config.seed)
            for document in documents
            if isinstance(document, Document)
        )
        held_out = held_out_share(numbers, share=held_out, least=LEAST_HELD_OUT)
    tokenizer = load_tokenizer(config.tokenizer)
    vocab = find_vocab(tokenizer, config.vocab, model=config.tokenizer)
    check_size(config.ngrams, vocab)
    encoder = Encoder(tokenizer, vocab)
    encoder.check()
    if config.data.messages:
        ChatTemplate(Path(config.tokenizer), encoder)  # raises if there is no template
    index = index_entries(benchmark_texts(config.decontaminate))
    plan = {
        "root": root,
        "parts": [asdict(part) for part in parts],
        "vocab": vocab.to_json(),
        "shares": read_table(config) if config.proportion.table else None,
        "held_out": held_out,
    }
    copy_tokenizer(config.tokenizer, folder / TOKENIZER)
    write_json(folder / INDEX, index)
    write_json(folder / PLAN, plan)
