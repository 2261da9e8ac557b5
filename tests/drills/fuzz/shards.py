"""Files of a finished data folder, damaged, exchanged or lost: what training and inspect read is what was
written, or refused.
"""

import random
import shutil
from functools import cache
from pathlib import Path

import numpy as np

from conf import UserError
from conf.stage import read_manifest
from data_prep.shards import SPLITS, Shards
from data_prep.vocab import Vocab
from tests.drills.fuzz import mutate, tools
from tests.drills.fuzz.command import call
from train.checks import check_adaptive
from train.config import ObjectiveConfig
from train.data import lay_out

COUNT = 1500
Content = list[tuple[bytes, bytes, list[str], list[int]]]


def run(rng: random.Random, folder: Path) -> str:
    """One change of one or two files."""
    out = folder / "data"
    shutil.copytree(tools.data_folder(), out)
    done = [change(rng, out) for _ in range(rng.choice((1, 1, 2)))]
    if rng.randrange(20) == 0:
        return call(
            "data_prep.inspect", [f"out={out}", f"inspect.html={rng.choice(('true', 'false'))}"], rng
        ).outcome
    split, objective = rng.choice(SPLITS), ObjectiveConfig()
    try:
        manifest = read_manifest(out, "shards", "data.path")
        vocab = Vocab.from_json(manifest["vocab"])
        check_adaptive(str(out), vocab, objective)
        shards = Shards(out, split)
        found = content(shards)
        lay_out([shards[0]], [0], vocab, objective, seed=(0,))
    except UserError as refusal:
        assert str(refusal).isprintable()
        return "refused"
    assert found == original(split), f"{done}: other sequences are read"
    assert vocab == Vocab.from_json(read_manifest(tools.data_folder(), "shards", "out")["vocab"]), done
    return "fine"


def change(rng: random.Random, out: Path) -> str:
    """A file is damaged, lost, made a folder, or takes another's place."""
    path = rng.choice(
        sorted(path for path in out.iterdir() if path.suffix == ".npy" or path.name == "manifest.json")
    )
    kind = rng.random()
    if kind < 0.06:
        path.unlink()
        return f"{path.name} is lost"
    if kind < 0.1:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    if kind < 0.2:
        other = rng.choice(sorted(out.glob("*.npy")))
        return f"{path.name} is {shutil.copyfile(other, path).name if other != path else other.name}"
    if kind < 0.3:
        stem = rng.choice(sorted(out.glob("*.tokens.npy"))).name.split(".")[0]
        other = rng.choice(sorted(out.glob("*.tokens.npy"))).name.split(".")[0]
        for name in ("tokens", "spans", "names", "sums"):
            if other != stem:
                shutil.copyfile(out / f"{other}.{name}.npy", out / f"{stem}.{name}.npy")
        return f"all of {stem} is {other}"
    if kind < 0.4 and path.suffix == ".npy":
        return _other_values(rng, path)
    data = path.read_bytes()
    as_json = path.suffix == ".json" and kind < 0.8
    path.write_bytes(mutate.changed_json(data, rng) if as_json else mutate.damaged(data, rng))
    return f"{path.name} is damaged"


def _other_values(rng: random.Random, path: Path) -> str:
    """A whole file of NumPy's, with a value, a type, a shape or an order of another kind."""
    array = np.array(np.load(path))
    kind = rng.randrange(4)
    if kind == 0:
        row = rng.randrange(len(array))
        flipped = bytearray(array[row].tobytes())
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        array[row] = np.frombuffer(bytes(flipped), array.dtype).reshape(array[row].shape)
    elif kind == 1:
        array = array[:: rng.choice((-1, 2))]
    elif kind == 2:
        array = (
            array.view(np.uint8)
            if array.dtype.names
            else array.astype(rng.choice((np.float32, np.uint64, ">u2")))
        )
    else:
        array = array[..., None] if rng.random() < 0.5 else np.asfortranarray(array)
    np.save(path, array)
    return f"{path.name} has another array"


def content(shards: Shards) -> Content:
    """All that is read of a split."""
    return [(one.tokens.tobytes(), one.spans.tobytes(), one.ids, one.documents.tolist()) for one in shards]


@cache
def original(split: str) -> Content:
    """As it was written."""
    return content(Shards(tools.data_folder(), split))
