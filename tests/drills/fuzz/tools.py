"""What the domains of data need once: tokenizers, and texts like those of real files."""

import copy
import random
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import yaml

from conf import UserError, settings
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from tests.drills.fuzz import mutate
from tests.drills.fuzz.command import Ended, call

CODELLAMA = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "codellama-7b"
PIECES = (
    "<s>",
    "</s>",
    " <PRE>",
    "▁<SUF>",
    "<MID>",
    "<EOT>",
    "<unk>",
    "<0x0A>",
    "▁",
    "<adaptive_1>",
    "Ġ",
    "▁▁",
)
METADATA = ("<reponame>a/b<gh_stars>10\n", "<filename>x.py\n", "<gh_stars>0\n", "<reponame>", "<filename>")
WIDE = {"mean_line": "null", "longest_line": "null", "alphanumeric": "null"}


@cache
def sources() -> list[str]:
    """Some real files."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path.read_text("utf-8") for name in ("json", "email") for path in sorted((root / name).glob("*.py"))
    ]


@cache
def data_folder() -> Path:
    """A small finished data folder, whose tokenizer is a byte-level BPE with adaptive tokens."""
    out = Path(tempfile.mkdtemp(prefix="fuzz-data-")) / "data"
    overrides = ["vocab=demo", "workers=1", f"data.path={sysconfig.get_path('stdlib')}", "vocab.train_size=400"]
    overrides += ["data.include=[json/*.py,logging/*.py]", "data.split_chars=150", "seq_len=128"]
    overrides += ["held_out=0.2", "shard_tokens=20000", f"out={out}"]
    prepare(settings("data_prep", DataPrepConfig, overrides))
    return out


def tokenizer(rng: random.Random) -> tuple[str, ...]:
    """Settings of one: mostly the small one, else CodeLlama's, where it is beside the project."""
    if CODELLAMA.is_dir() and rng.random() < 0.1:
        return (f"tokenizer={CODELLAMA}", "vocab=codellama")
    return (f"tokenizer={data_folder() / 'tokenizer'}", "vocab=demo")


def prepared(groups: tuple[str, ...], asked: Sequence[str], rng: random.Random) -> Ended:
    """data_prep with settings: as a command now and then, else without composing YAML each time."""
    if rng.randrange(50) == 0:
        return call("data_prep", [*groups, *asked], rng)
    config = copy.deepcopy(_base(groups))
    for one in asked:
        name, _, text = one.partition("=")
        *path, last = name.split(".")
        setattr(reduce(getattr, path, config), last, yaml.safe_load(text))
    try:
        prepare(replace(config))  # which checks the values
    except UserError as refusal:
        return Ended(str(refusal), "")
    return Ended("", "")


@cache
def _base(groups: tuple[str, ...]) -> DataPrepConfig:
    return settings("data_prep", DataPrepConfig, [*groups, "data.path=d", "out=o"])


def document(rng: random.Random) -> str:
    """A text: a piece of a real file, control pieces, anything, or all of them joined."""
    kind = rng.randrange(6)
    if kind == 0:
        return mutate.text(rng)
    if kind == 1:
        return rng.choice(METADATA) * rng.choice((1, 2)) + "x = 1\n"
    if kind == 2:
        return "".join(rng.choice((*PIECES, " ", "a", "\n")) for _ in range(rng.randrange(12)))
    if kind == 3:
        return "".join(
            mutate.text(rng)[:50] + rng.choice(("\n", "\r\n", "\x0c", "\u2028", "")) for _ in range(5)
        )
    whole = rng.choice(sources())
    start = rng.randrange(len(whole))
    return whole[start : start + rng.choice((1, 40, 400, 3000))]
