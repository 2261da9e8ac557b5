"""Shared fixtures: tiny real data and tiny random models; one thread per process."""

import fcntl
import gc
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from conf.runs.files import read_json
from conf.settings.compose import settings
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from data_prep.vocab import INFILLING, Vocab
from tests import bpe

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

hypothesis_settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # fails on a busy machine
)
hypothesis_settings.load_profile("default")

#: The slowest files, slowest first: if one started last, a single process would work alone at the end.
LONGEST = (
    "train/test_resume.py",
    "test_model_types.py",
    "infer/test_ratio_decoding.py",
    "train/export/test_export.py",
    "test_pipeline.py",
    "train/test_tracker.py",
    "data_prep/test_pipeline.py",
    "infer/drafters/test_planner.py",
    "infer/bench/test_gsd.py",
    "infer/bench/test_bench.py",
    "infer/models/test_parallel.py",
    "data_prep/test_hub.py",
    "train/export/test_served.py",
    "conf/test_command_line.py",
    "infer/portable/test_custom_generate.py",
    "test_portable.py",
    "data_prep/test_chat.py",
    "test_docs.py",
    "infer/engine/test_static.py",
    "train/test_launch.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Import PyTorch in the processes that run tests.

    In the process that only starts the workers, the import would delay them by 5 s.
    """
    if not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first; keep the order of the rest."""
    folder = Path(__file__).parent
    rank = {folder / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection.

    They have almost 500,000 objects, which every full collection would search.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


SHARED = Path(__file__).parents[2] / "shared" / "data"


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads of PyTorch, then with one again."""
    import torch

    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder ../shared/data with benchmarks and tokenizers; skip the test without it."""
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    return SHARED


def data_arguments(out: Path, *overrides: str) -> list[str]:
    """Return the arguments of a small data preparation on a few files of the standard library.

    The files are copied next to `out`. Python's own folder may contain 50,000 files of installed packages,
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
    """Return the folder that `make` fills once; all processes of a test run share it and must not change it."""
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
) -> "LlamaForCausalLM":
    """Return a random Llama with logits so far apart that greedy decoding does not just repeat a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
def llama() -> "LlamaForCausalLM":
    return tiny_llama()


def training_manifest(vocab: Vocab) -> dict[str, Any]:
    """Return the part of a training manifest that adaptive.json depends on, with one adaptive id."""
    return {
        "adaptive": vocab.adaptive[:1],
        "L": 5,
        "settings": {"objective": {}, "model": {}, "lora": {}},
        "vocab": vocab.to_json(),
        "inputs": {"data.path": ""},
        "commit": "",
    }
