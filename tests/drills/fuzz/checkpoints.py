"""Checkpoints of a training with one file damaged: exported from, and gone on from.

What is read is what was written, of the newest checkpoint that is whole; or it is refused. A pickle that names
anything but what our checkpoints hold is never run, even where its checksum is right.
"""

import functools
import json
import os
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from conf import UserError
from tests.drills.fuzz import mutate
from tests.drills.fuzz.command import call
from tests.drills.fuzz.model_directories import refused
from tests.drills.fuzz.tiny import TRAINING, made
from train.checkpoint import BrokenFile, list_checkpoints, read_checkpoint, write_checkpoint, write_file
from train.export.trained import open_trained
from train.export.weights import CheckpointWeights

COUNT = 1500
MARK = "FUZZ_PICKLE_RAN"  # what a foreign pickle leaves in the environment


class Foreign:
    """A pickle that would run something."""

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, str]]]:
        return exec, (f"import os; os.environ[{MARK!r}] = '1'", {})


def run(rng: random.Random, folder: Path) -> str:
    """One damaged folder, read in one of the ways."""
    training = folder / "training"
    shutil.copytree(
        made() / "training", training, copy_function=os.link, ignore=shutil.ignore_patterns("wandb")
    )
    way = rng.choice((*28 * [exported], by_command, resumed))
    if way is resumed:
        (training / "manifest.json").unlink()
        shutil.copyfile(made() / "training" / "log.jsonl", _fresh(training / "log.jsonl"))
    damage(training, rng)
    with patch.dict(os.environ):
        os.environ.pop(MARK, None)
        outcome = way(training, folder, rng)
        assert MARK not in os.environ, "a pickle was run"
    return outcome


def _fresh(path: Path) -> Path:
    """A place of a linked file that can be written without changing the other."""
    path.unlink(missing_ok=True)
    return path


def damage(training: Path, rng: random.Random) -> None:
    """One or two files, seldom a whole checkpoint."""
    steps = sorted((training / "checkpoints").iterdir())
    for _ in range(rng.choice((1, 1, 2))):
        step = rng.choice((steps[-1], steps[-1], *steps))
        kind = rng.randrange(12)
        if kind == 0:
            shutil.rmtree(step, ignore_errors=True)
        elif kind == 1:
            _forged(step, rng)
        elif kind == 2:
            _swapped(step, rng.choice(steps), rng)
        elif step.is_dir():
            _bytes_changed(rng.choice([*step.iterdir(), *_beside(training)]), rng)


def _beside(training: Path) -> list[Path]:
    names = ("manifest.json", "run.json", "log.jsonl", "model/config.json", "model/tokenizer.json")
    return [path for name in names if (path := training / name).is_file()]


def _bytes_changed(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    _fresh(file)
    if rng.random() < 0.1:
        return
    if file.suffix == ".json" and rng.random() < 0.6:
        with suppress(ValueError):  # damaged by an earlier change
            data = mutate.changed_json(data, rng)
            file.write_bytes(data)
            return
    file.write_bytes(mutate.damaged(data, rng))


def _swapped(step: Path, other: Path, rng: random.Random) -> None:
    """A file of another checkpoint in the place of this one's."""
    if step.is_dir() and other.is_dir():
        name = rng.choice([path.name for path in step.iterdir()])
        content = (other / name).read_bytes() if (other / name).is_file() else b""
        _fresh(step / name).write_bytes(content)


def _forged(step: Path, rng: random.Random) -> None:
    """A file with a foreign global, or with other plain values, and a record that vouches for it."""
    if not (step / "checkpoint.json").is_file():
        return
    try:
        record = read_checkpoint(step)
    except BrokenFile:  # damaged before
        return
    name = rng.choice(sorted(record.files))
    if rng.random() < 0.5:
        value = torch.load(step / name, weights_only=False)
        value[rng.choice(list(value))] = Foreign()
        record.files[name] = write_file(value, _fresh(step / name))
    else:
        record.files[name] = write_file(Foreign(), _fresh(step / name))
    _fresh(step / "checkpoint.json")
    write_checkpoint(step, record)


def exported(training: Path, folder: Path, rng: random.Random) -> str:
    """What an export reads."""
    try:
        trained = open_trained(str(training))
        found = dict(trained.weights(torch.float32))
    except UserError as error:
        return refused(error)
    _check_weights(found, trained.checkpoint.step)
    return "fine" if trained.checkpoint.step == 6 else "an earlier one"


def by_command(training: Path, folder: Path, rng: random.Random) -> str:
    """`python -m train.export`: nothing is written, or a whole directory."""
    out = folder / "model"
    given = [f"checkpoint={training}", f"out={out}", "dtype=float32", "verify=false", "tracker.mode=disabled"]
    ended = call("train.export", given, rng)
    if ended.told:
        assert not out.exists(), "a refusal left a directory"
        return "refused"
    step = json.loads((out / "manifest.json").read_text())["step"]
    weights = (out / "model.safetensors").read_bytes()
    assert step != 6 or weights == (made() / "model" / "model.safetensors").read_bytes(), "other weights"
    return "fine" if step == 6 else "an earlier one"


def resumed(training: Path, folder: Path, rng: random.Random) -> str:
    """`python -m train` goes on from the newest whole one: the same losses and weights at the end."""
    data = f"data.path={made() / 'data'}"
    ended = call("train", [*TRAINING, data, f"out={training}"], random.Random(1))
    if ended.told:
        return "refused"
    newest = list_checkpoints(training / "checkpoints")[0]
    assert newest.name == "step-000006" and (training / "manifest.json").is_file(), "it is not finished"
    _check_weights(dict(CheckpointWeights(newest)), 6)
    return "fine"


def _check_weights(found: Mapping[str, Tensor], step: int) -> None:
    wanted = _weights(step)
    assert found.keys() == wanted.keys(), f"step {step}: {found.keys() ^ wanted.keys()}"
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"step {step}: {name} is another"


@functools.cache
def _weights(step: int) -> dict[str, Tensor]:
    """What was written."""
    return dict(CheckpointWeights(made() / "training" / "checkpoints" / f"step-{step:06}"))
