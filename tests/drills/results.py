"""What a stage left, compared with what an undisturbed run left. Starts nothing."""

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


def hashes(stage: Stage, run: Path) -> dict[str, str]:
    """Return a hash of what is compared of every file below a folder, hidden ones too; name empty folders."""
    return {name: value for name, _ in _files(run) if (value := _hash(stage, name, run)) is not None}


def _hash(stage: Stage, name: str, run: Path) -> str | None:
    path = run / name
    views = [view for pattern, view in stage.views.items() if fnmatch(name, pattern)]
    if None in views:
        return None
    if path.is_dir():
        return "an empty folder"
    content = json.dumps(views[0](path), sort_keys=True).encode() if views and views[0] else path.read_bytes()
    return hashlib.sha256(content.replace(str(run).encode(), b"RUN")).hexdigest()


def differences(actual: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is left over"
        elif actual[name] != expected[name]:
            yield f"{name} differs"


def incomplete(stage: Stage, run: Path, expected: Mapping[str, str]) -> Iterator[str]:
    visible = {name: path for name, path in _files(run) if not any(part[0] == "." for part in Path(name).parts)}
    for name, path in visible.items():
        transient = any(fnmatch(name, pattern) for pattern in (*stage.growing, *stage.passing))
        # A log may end in half a line; other files are replaced as a whole.
        if not (transient and path.suffix == ".jsonl") and (reason := _unreadable(path)):
            yield f"{name} is visible and unreadable: {reason}"
        elif transient or (path.is_dir() and any(other.startswith(f"{name}/") for other in expected)):
            continue  # a folder to be filled: `folders` says whether it may be visible half full
        elif (value := _hash(stage, name, run)) is not None and name not in expected:
            yield f"{name} is visible and belongs to no result"
        elif value is not None and value != expected[name]:
            yield f"{name} is visible and differs from the result"
    for name in stage.folders:
        if (run / name).is_dir() and any((run / name).iterdir()) and f"{name}/{MANIFEST}" not in visible:
            yield f"{name} is visible without a manifest"
    for folder in [name.removesuffix(MANIFEST) for name in visible if Path(name).name == MANIFEST]:
        missing = [name for name in expected if name.startswith(folder) and name not in visible]
        if missing:
            yield f"{folder} has a manifest and lacks {missing}"
    for checkpoint in run.glob("out/checkpoints/step-*"):
        try:
            read_checkpoint(checkpoint)
        except BrokenFile as broken:
            yield f"{checkpoint.name} is visible and broken: {broken}"
        if f"out/checkpoints/{checkpoint.name}/{DESCRIBED}" in expected:
            own = [
                {name: value for name, value in all_hashes.items() if f"/{checkpoint.name}/" in name}
                for all_hashes in (hashes(stage, run), expected)
            ]
            yield from differences(*own)


def _unreadable(path: Path) -> str:
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
    except Exception as error:  # whatever a reader of that kind raises
        return f"{type(error).__name__}: {error}"
    return ""


def _files(run: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(run.rglob("*")):
        if path.is_file() or (path.is_dir() and not any(path.iterdir())):
            yield path.relative_to(run).as_posix(), path
