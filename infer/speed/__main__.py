"""python -m infer.speed: plain decoding and every other way side by side, on prompts, in pairs.

    torchrun --nproc_per_node 8 -m infer.speed model=DIR [base=DIR0] [draft=DIR2] prompts=humaneval out=DIR

Every rank has whole models of its own and a share of the turns; a run that was interrupted goes on. In float32
every text of ours must be that of plain decoding, or the run fails, once its report is written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from conf import LoneError, UserError, run
from conf.stage import commit, is_finished, made_from, versions, write_json, write_manifest
from infer.crew import Members, Units, folder, muster
from infer.hardware import hardware
from infer.speed.aggregate import HEADER, UNITS, read
from infer.speed.bench import Bench
from infer.speed.config import SpeedConfig
from infer.speed.prepare import prepare
from infer.speed.show import show
from infer.speed.work import Unit, Worker, units_of

KIND = "speed"
RESULT = "speed.json"


def main(config: SpeedConfig) -> None:
    """Measure and report, unless the folder already holds the measurements."""
    if config.threads:
        torch.set_num_threads(config.threads)
    members, out = muster(), Path(config.out) / KIND
    made = made_from(config, _inputs(config), ignore=("tracker",))
    if not is_finished(out, KIND, made):
        measure(config, made, members)
    elif members.first:
        print(f"speed: {out} is finished: nothing to do")
    if members.first:
        _report(config)


def measure(config: SpeedConfig, made: Mapping[str, Any], members: Members) -> None:
    """The folder DIR/speed, made by all ranks."""
    prepared = prepare(config)
    bench = Bench(config, prepared, device=members.device())
    found = units_of(prepared.prompts, config.rounds)
    # Pairs of one machine do not belong with those of another.
    with folder(Path(config.out) / KIND, {**made, "hardware": hardware()}, members) as partial:
        if members.first and not (partial / HEADER).is_file():
            write_json(partial / HEADER, header(config, bench, members, all_=len(found)))
        units, worker = Units(partial / UNITS, list(found)), Worker(bench, prepared.prompts)
        _do(units, found, worker, members)
        members.wait()
        if members.first:
            write_json(partial / RESULT, read(partial))
            write_manifest(partial, KIND, made)


def header(config: SpeedConfig, bench: Bench, members: Members, *, all_: int) -> dict[str, Any]:
    """What all units share."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": asdict(config),
        "model": Path(config.model).resolve().name,
        "ranks": members.world,
        "all": all_,
        "limits": [],
        "costs": [],
    }


def _do(units: Units, found: Mapping[str, Unit], worker: Worker, members: Members) -> None:
    left = units.open(members)
    with Progress(disable=not members.first) as progress:
        for name in progress.track(left, description=KIND):
            try:
                units.save(name, worker(found[name]))
            except UserError as error:
                raise LoneError(str(error)) from error


def _inputs(config: SpeedConfig) -> dict[str, str]:
    named = {"model": config.model, "base": config.base, "draft.model": config.draft.model}
    return {
        name: folder for name, folder in named.items() if folder and (Path(folder) / "manifest.json").is_file()
    }


def _report(config: SpeedConfig) -> None:
    """Shown; a report that shows a lossy decoder is written, and then fails the run, and every later one."""
    found = json.loads((Path(config.out) / KIND / RESULT).read_text(encoding="utf-8"))
    show(found)
    lossy = [row for row in found["rows"] if _is_lossy(row)]
    if lossy:
        names = ", ".join(
            f"{row['decoder']}{' k=' * bool(row['k'])}{row['k'] or ''} on {row['prompt_set']}" for row in lossy
        )
        raise LoneError(
            f"float32 outputs: wanted all identical to plain decoding, found differences in {names}"
        )


def _is_lossy(row: Mapping[str, Any]) -> bool:
    promised = row["dtype"] == "float32" and not row["peer"]
    return promised and row["identical"] < row["compared"]


if __name__ == "__main__":
    run("speed", SpeedConfig, main)
