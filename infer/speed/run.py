"""A run of infer.speed: what is made, checked and told, from the settings to the report."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from conf import LoneError
from conf.characters import print_line
from conf.files import write_json
from conf.pages import NOT_IDENTICAL
from conf.sealed import sealed
from conf.stage import existing, is_finished, made_from, write_manifest
from infer.hardware import hardware
from infer.measure.crew import Members, Units, folder, muster
from infer.measure.unfinished import HEADER, UNITS
from infer.report.rows import label
from infer.report.terminal import print_report
from infer.report.write import write
from infer.speed.aggregate import read
from infer.speed.bench import Bench
from infer.speed.config import SpeedConfig
from infer.speed.header import header
from infer.speed.place import check_place
from infer.speed.prepare import Prepared, fingerprint, prepare
from infer.speed.work import Unit, Worker, units_of

KIND = "speed"
RESULT = "speed.json"


def run(config: SpeedConfig) -> None:
    """Measure and report, unless the folder already holds the measurements."""
    if config.threads:
        torch.set_num_threads(config.threads)
    members, out = muster(), Path(config.out) / KIND
    prepared = prepare(config)
    made = _made(config, prepared)
    if not is_finished(out, KIND, made):
        measure(config, prepared, made, members)
    elif members.first:
        print_line(f"speed: {out} is finished: nothing to do")
    if members.first:
        _report(config)


def measure(config: SpeedConfig, prepared: Prepared, made: Mapping[str, Any], members: Members) -> None:
    """The folder DIR/speed, made by all ranks."""
    if members.first and prepared.k != config.k:
        print_line(f"speed: of k={config.k} the model's adaptive tokens allow {prepared.k}")
    skipped = [{"prompt_set": name, "reason": reason} for name, reason in prepared.skipped.items()]
    for one in skipped if members.first else ():
        print_line(f"speed: {one['prompt_set']} is left out: {one['reason']}")
    begun = _begun(made)
    if members.first:
        check_place(Path(config.out) / KIND, begun)
    config = replace(config, k=prepared.k)
    bench = Bench(config, prepared, device=members.device())
    found = units_of(prepared.prompts, config.rounds, batches=config.has_batches)
    with folder(Path(config.out) / KIND, begun, members) as partial:
        if members.first and not (partial / HEADER).is_file():
            told = header(config, prepared.prompts, bench.lms, ranks=members.world, all_=len(found))
            left_out = [{"peer": name, "reason": reason} for name, reason in bench.peers.left_out.items()]
            write_json(partial / HEADER, sealed({**told, "skipped": skipped, "left_out": left_out}))
        units, worker = Units(partial / UNITS, list(found)), Worker(config, prepared, bench)
        _do(units, found, worker, members)
        members.wait()
        if members.first:
            write_json(partial / RESULT, sealed(read(partial)))
            write_manifest(partial, KIND, made)


def _begun(made: Mapping[str, Any]) -> dict[str, Any]:
    """What pairs must share to belong together: also the machine, and the threads in use, whoever set them."""
    settings = {name: value for name, value in made["settings"].items() if name != "threads"}
    return {**made, "settings": settings, "hardware": hardware()}


def _do(units: Units, found: Mapping[str, Unit], worker: Worker, members: Members) -> None:
    left = units.open(members)
    with Progress(disable=not members.first) as progress:
        for name in progress.track(left, description=KIND):
            units.save(name, worker(found[name]))


def _made(config: SpeedConfig, prepared: Prepared) -> dict[str, Any]:
    """What the figures are of. The prompts themselves count, not where they were read."""
    made = made_from(config, _inputs(config), ignore=("tracker",))
    read = {f"prompts.{name}": fingerprint(prompts) for name, prompts in prepared.prompts.items()}
    return {**made, "inputs": {**made["inputs"], **read}}


def _inputs(config: SpeedConfig) -> dict[str, str]:
    return existing({"model": config.model, "base": config.base, "draft.model": config.draft.model})


def _report(config: SpeedConfig) -> None:
    """Written and shown; one that shows a lossy decoder fails the run after that, and every later one."""
    found = write(Path(config.out), config.tracker)
    print_report(found, ["speed"])
    lossy = [f"{label(row)} on {row['prompt_set']}" for row in found["speed"]["rows"] if _is_lossy(row)]
    if lossy:
        raise LoneError(
            "float32 outputs: wanted all identical to plain decoding, found differences in " + ", ".join(lossy),
            page=NOT_IDENTICAL,
        )


def _is_lossy(row: Mapping[str, Any]) -> bool:
    promised = row["dtype"] == "float32" and not row["peer"]
    return promised and row["identical"] < row["compared"]
