"""What a stage has left, held against what an undisturbed run left. Knows folders; starts nothing."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import safe_open

from conf.stage import MANIFEST
from tests.drills.stages import Stage
from train.checkpoint import DESCRIBED, BrokenFile, read_checkpoint


def facts_of(stage: Stage, run: Path) -> dict[str, str]:
    """Of every file below a folder, hidden ones too, a hash of what is compared; empty folders by name."""
    return {name: fact for name, _ in _files(run) if (fact := fact_of(stage, name, run)) is not None}


def fact_of(stage: Stage, name: str, run: Path) -> str | None:
    """None of what is not compared; the folder's own name may stand in it."""
    path = run / name
    views = [view for pattern, view in stage.views.items() if fnmatch(name, pattern)]
    if None in views:
        return None
    if path.is_dir():
        return "an empty folder"
    view = views[0] if views else None
    content = json.dumps(view(path), sort_keys=True).encode() if view else path.read_bytes()
    return hashlib.sha256(content.replace(str(run).encode(), b"RUN")).hexdigest()


def difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """What is missing, other or too much."""
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in wanted:
            yield f"{name} is left over"
        elif found[name] != wanted[name]:
            yield f"{name} is another"


def not_whole(stage: Stage, run: Path, wanted: Mapping[str, str]) -> Iterator[str]:
    """What is visible of a stage that was killed, and should not be."""
    seen = {name: path for name, path in _files(run) if not any(part[0] == "." for part in Path(name).parts)}
    for name, path in seen.items():
        on_the_way = any(fnmatch(name, pattern) for pattern in (*stage.growing, *stage.passing))
        # A log may end in half a line; a file that is written anew each time is whole each time.
        if not (on_the_way and path.suffix == ".jsonl") and (why := _unreadable(path)):
            yield f"{name} is visible and cannot be read: {why}"
        elif on_the_way:
            continue
        elif path.is_dir() and any(one.startswith(f"{name}/") for one in wanted):
            continue  # to be filled: whether it may be seen half full, `folders` says
        elif (fact := fact_of(stage, name, run)) is not None and name not in wanted:
            yield f"{name} is visible and belongs to no result"
        elif fact is not None and fact != wanted[name]:
            yield f"{name} is visible and is not the result's"
    for name in stage.folders:
        if (run / name).is_dir() and any((run / name).iterdir()) and f"{name}/{MANIFEST}" not in seen:
            yield f"{name} is visible and has no manifest"
    for place in [name.removesuffix(MANIFEST) for name in seen if Path(name).name == MANIFEST]:
        missing = [name for name in wanted if name.startswith(place) and name not in seen]
        if missing:
            yield f"{place} has a manifest and lacks {missing}"
    for checkpoint in run.glob("out/checkpoints/step-*"):
        try:
            read_checkpoint(checkpoint)
        except BrokenFile as broken:
            yield f"{checkpoint.name} is visible and broken: {broken}"
        if f"out/checkpoints/{checkpoint.name}/{DESCRIBED}" in wanted:
            yield from difference(_part(facts_of(stage, run), checkpoint.name), _part(wanted, checkpoint.name))


def _part(facts: Mapping[str, str], folder: str) -> dict[str, str]:
    return {name: fact for name, fact in facts.items() if f"/{folder}/" in name}


def _unreadable(path: Path) -> str:
    """Why a file is not whole, by its kind."""
    try:
        match path.suffix:
            case ".json":
                json.loads(path.read_text(encoding="utf-8"))
            case ".jsonl":
                [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            case ".npy":
                np.load(path)
            case ".png":
                Image.open(path).load()
            case ".html" if not path.read_text(encoding="utf-8").rstrip().endswith("</html>"):
                return "it has no end"
            case ".safetensors":
                safe_open(path, "numpy")
    except Exception as error:  # whatever a reader of that kind finds wrong
        return f"{type(error).__name__}: {error}"
    return ""


def _files(run: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(run.rglob("*")):
        if path.is_file() or (path.is_dir() and not any(path.iterdir())):
            yield path.relative_to(run).as_posix(), path
