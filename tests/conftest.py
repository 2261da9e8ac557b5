"""Shared fixtures: one thread per process, tiny real data, tiny random models."""

import fcntl
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from transformers import LlamaConfig, LlamaForCausalLM

from conf import settings
from conf.files import read_json
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from data_prep.vocab import INFILLING, Vocab
from tests import bpe

torch.set_num_threads(1)
hypothesis_settings.register_profile("default", deadline=None, derandomize=True)
hypothesis_settings.load_profile("default")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The benchmarks and tokenizers beside the project; tests that need them skip where they are not."""
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    return SHARED


def data_arguments(out: Path, *overrides: str) -> list[str]:
    """Of a small data preparation on a few files of the standard library.

    They are copied beside `out`: the library's folder may have 50,000 files of installed packages too,
    which take 3 s to list.
    """
    sources = out.with_name("sources")
    for package in ("json", "email", "logging"):
        copied = sources / package
        copied.mkdir(parents=True, exist_ok=True)
        for file in Path(sysconfig.get_path("stdlib"), package).glob("*.py"):
            shutil.copyfile(file, copied / file.name)
    return [
        f"tokenizer={bpe.FOLDER}",
        bpe.ADAPTIVE,
        "workers=1",
        f"data.path={sources}",
        "data.include=[json/*.py,email/*.py,logging/*.py]",
        "data.split_chars=150",
        "seq_len=128",
        "held_out=0.2",
        f"out={out}",
        *overrides,
    ]


def data_settings(out: Path, *overrides: str) -> DataPrepConfig:
    return settings("data_prep", DataPrepConfig, data_arguments(out, *overrides))


def text_vocab(size: int, *adaptive: int) -> Vocab:
    """Return a vocabulary without infilling."""
    pieces = dict.fromkeys(INFILLING)
    return Vocab(size=size, bos=0, eos=1, adaptive=adaptive, **pieces)


def vocab_of(folder: Path) -> Vocab:
    """Return the vocabulary of a data folder."""
    return Vocab.from_json(read_json(folder / "manifest.json")["vocab"])


def write_rows(file: Path, rows: Iterable[object]) -> Path:
    """Write JSON lines; return their file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return the folder that `make` fills, which all processes of a test run share and none may change."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(f"{folder}.made").exists():
            folder.mkdir()
            make(folder)
            Path(f"{folder}.made").touch()
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "data", lambda out: prepare(data_settings(out)))


def tiny_llama(
    *, vocab: int = 97, kv_heads: int = 2, seed: int = 0
) -> LlamaForCausalLM:
    """A random Llama whose logits are far enough apart that greedy decoding does not merely repeat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM._from_config(config).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


def training_manifest(vocab: Vocab) -> dict[str, Any]:
    """Return what adaptive.json reads of the manifest of a training with one adaptive id."""
    return {
        "adaptive": vocab.adaptive[:1],
        "L": 5,
        "settings": {"objective": {}, "model": {}, "lora": {}},
        "vocab": vocab.to_json(),
        "inputs": {"data.path": ""},
        "commit": "",
    }
