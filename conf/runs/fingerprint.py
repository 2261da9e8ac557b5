"""Compute fingerprints of a stage's inputs: SHA-256 of their content, independent of their paths.

    a file                     SHA-256 of the file
    several files              SHA-256 of their names, sizes and blocks
    a model directory          several files: weights, configuration and tokenizer
    an adapter's folder        the same
    an output folder           its manifest, which has the checksums of the other files

All blocks of all files are read, by all cores, at about 1.7 GB/s for each core. Sampling blocks would miss a
training of adaptive rows, which changes a millionth of a 7B model, and modification times change with every
`cp`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from conf.adapter import CONFIG
from conf.errors import UserError

MANIFEST = "manifest.json"
BLOCK = 2**24  # bytes that a thread hashes at once
QUEUE = 2**10  # blocks that are queued at once
# Suffixes of the files that Transformers and infer read in a model directory. README.md is not among them:
# `train.export report=` rewrites it.
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")


def fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of a model directory or of a finished output folder."""
    path = Path(folder)
    if any((path / name).is_file() for name in ("config.json", CONFIG)):
        return fingerprint_model(path)
    return fingerprint_file(path / MANIFEST)


def fingerprint_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_model(folder: Path) -> str:
    """Return the fingerprint of the files that a model is loaded from, its adapter included.

    The manifest is excluded, so a repeated export of the same weights has the same fingerprint.
    """
    read = {
        path
        for place in (folder, folder / "adapter")
        for path in place.glob("[!.]*")
        if path.suffix in MODEL_SUFFIXES and path.name != MANIFEST and path.is_file()
    }
    read.update(_indexed(folder))
    return fingerprint_files((os.path.relpath(path, folder), path) for path in read)


def _indexed(folder: Path) -> Iterator[Path]:
    """Yield the weight files that an index lists, which may be in other folders."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            continue  # loading the model reports the damaged index
        yield from (
            path
            for name in names
            if isinstance(name, str) and (path := folder / name).is_file()
        )


def fingerprint_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return the SHA-256 of files, given as pairs (name, path) in any order.

    Raises UserError for a file that cannot be read.
    """
    total = hashlib.sha256()
    blocks = _blocks(sorted(files))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while batch := list(islice(blocks, QUEUE)):
            for digest in pool.map(_digest, batch):
                total.update(digest)
    return total.hexdigest()


def _blocks(files: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Path, int]]:
    """Yield (name, path, start) of each block of the files; an empty file has one block."""
    for name, path in files:
        with _readable(path):
            size = path.stat().st_size
        for start in range(0, max(1, size), BLOCK):
            yield name, path, start


def _digest(block: tuple[str, Path, int]) -> bytes:
    """Return the SHA-256 of a block with its start, length and file name."""
    name, path, start = block
    with _readable(path), open(path, "rb") as file:
        file.seek(start)
        content = file.read(BLOCK)
    head = f"{start} {len(content)} {name}\n".encode("utf-8", "surrogateescape")
    return hashlib.sha256(head + content).digest()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} must be readable, got {error.strerror}. Repair or remove it, and rerun the command"
        ) from error
