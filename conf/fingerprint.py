"""Fingerprints of a stage's inputs: SHA-256 of their content, not of their paths.

    a file                  SHA-256 of it
    files                   SHA-256 of their names, sizes and blocks
    a model directory       its weights, configuration and tokenizer, as files
    an adapter's folder     the same
    a folder of a stage     its manifest, which has the checksums of the rest

Files are read whole, in blocks, by all cores: about 1.7 GB/s for each core. Sampled
blocks would miss a training of adaptive rows, which changes a millionth of a 7B model,
and modification times change with every `cp`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from conf.errors import UserError

MANIFEST = "manifest.json"
BLOCK = 2**24  # bytes that a thread hashes at once
QUEUE = 2**10  # blocks that wait for a thread at once
# What Transformers and infer read of a model directory. Not the card, which `train.export report=` writes anew.
READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")


def fingerprint(folder: str | Path) -> str:
    """Return what the next stage records of a model directory, or of a finished folder, as its input."""
    path = Path(folder)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return fingerprint_model(path)
    return fingerprint_file(path / MANIFEST)


def fingerprint_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_model(folder: Path) -> str:
    """Return the fingerprint of what a model directory is loaded from, its adapter included.

    The manifest is left out: an export made again, of the same weights, is the same model.
    """
    read = {
        path
        for place in (folder, folder / "adapter")
        for path in place.glob("[!.]*")
        if path.suffix in READ and path.name != MANIFEST and path.is_file()
    }
    read.update(_indexed(folder))
    return fingerprint_files((os.path.relpath(path, folder), path) for path in read)


def _indexed(folder: Path) -> Iterator[Path]:
    """Yield the weights that an index names: Transformers reads them from other folders too."""
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
            continue  # who loads the model refuses it
        yield from (
            path
            for name in names
            if isinstance(name, str) and (path := folder / name).is_file()
        )


def fingerprint_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return the SHA-256 of files, given as (name, path), whatever their order.

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
    """Yield the blocks of each file, by name, path and start; an empty file has one too."""
    for name, path in files:
        with _readable(path):
            size = path.stat().st_size
        for start in range(0, max(1, size), BLOCK):
            yield name, path, start


def _digest(block: tuple[str, Path, int]) -> bytes:
    """Return the SHA-256 of a block with its place."""
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
            f"{path} must be readable, got {error.strerror}. Repair or remove it, and run the command again"
        ) from error
