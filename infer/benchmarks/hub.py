"""Datasets of the hub, or of its cache on this machine, within a bounded time."""

from dataclasses import dataclass
from threading import Thread
from typing import Any

from conf import UserError
from conf.pages import HUB
from infer.benchmarks.rows import Row, placed

PATIENCE = 180  # seconds: the libraries try a dead line for half a minute and more


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset's name, one of its configurations, and its splits."""

    name: str
    configuration: str | None = None
    splits: tuple[str, ...] = ("test",)


def hub_rows(dataset: Dataset, setting: str) -> list[Row]:
    """All rows of the splits. Raises UserError, naming the setting, where the hub does not give them."""
    found: list[Any] = []

    def load() -> None:
        try:
            found.append(_load(dataset))
        except Exception as error:  # of many libraries, all of which mean that it is not there
            found.append(error)

    # A daemon: when time is up it must not keep the process from ending.
    loading = Thread(target=load, daemon=True)
    loading.start()
    loading.join(PATIENCE)
    answer = found[0] if found else TimeoutError(f"no answer in {PATIENCE} s")
    if isinstance(answer, Exception):
        reason = f"{type(answer).__name__}: {str(answer).strip()}".split("\n")[0][:160]
        raise UserError(
            f"{setting}.path: wanted the dataset {dataset.name} from the hub, found {reason}: give a file as "
            f"{setting}.path=FILE",
            page=HUB,
        ) from answer
    name = " ".join(filter(None, (dataset.name, dataset.configuration)))
    return placed(answer, dataset.configuration or "", f"{name}, row ")


def _load(dataset: Dataset) -> list[dict[str, Any]]:
    from datasets import load_dataset

    loaded = load_dataset(dataset.name, dataset.configuration)
    return [row for split in dataset.splits for row in loaded[split]]
