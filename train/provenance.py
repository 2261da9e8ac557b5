"""What a model was made of, for its card: what the base model's folder says of itself, and what the data are.

Knows manifests and the hub's way of storing; asks nobody.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from yaml import YAMLError

from conf.stage import read_manifest
from train.config import TrainConfig

CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")  # as the hub's client caches
LICENSE = ("license", "license_name", "license_link")


def base_model(folder: str | None) -> dict[str, Any]:
    """Name and license where they are told, and, of the hub's cache, repository and commit.

    A name is the hub's, or the model_name of the folder's card. What the folder is called says where it lies,
    and its config.json often has the name of a fine-tuned model's own base.
    """
    if folder is None:
        return {}
    path = Path(folder).resolve()
    if found := CACHED.search(path.as_posix()):
        owner, name, commit = found.groups()
        card = _card(path, LICENSE)
        return {"name": name, "hub": f"{owner}/{name}", "commit": commit, **card}
    card = _card(path, ("model_name", *LICENSE))
    return {name.removeprefix("model_"): value for name, value in card.items()}


def trained_on(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of a data manifest: documents, tokens, documents by layout (plain and the orders of infilling), languages
    with the most tokens first, and the benchmarks that it is decontaminated against, None where not said.
    """
    train = data["train"]
    languages = sorted(train["languages"], key=lambda name: -train["languages"][name]["tokens"])
    totals = {name: train[name] for name in ("documents", "tokens", "modes")}
    return {**totals, "languages": languages, "decontaminated": data.get("decontaminated")}


def own_text(config: TrainConfig) -> dict[str, Any]:
    """Of data.own: documents, tokens, and the share of a step's sequences that it has."""
    assert config.data.own is not None
    train = read_manifest(config.data.own, "shards", "data.own")["train"]
    share = config.data.own_sequences(config.global_batch) / config.global_batch
    return {"documents": train["documents"], "tokens": train["tokens"], "share": share}


def _card(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """What the front matter of its model card says."""
    try:
        card = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, YAMLError):  # none, or one that nobody checked
        return {}
    return {name: card[name] for name in names if isinstance(card.get(name), str)}
