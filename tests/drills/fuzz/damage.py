"""Finished folders with a file damaged, lost or exchanged: what is read is what was written, or is refused.

A model directory is believed where it can be: another rotary base is another model, and a flipped byte of a
weight cannot be distinguished from the weight. So whatever decodes must decode losslessly, as the library's
own forward does, and what only says how to draft must change no token. A pickle that names anything but what
our checkpoints hold is never run, even where its checksum is right.
"""

import functools
import json
import logging
import os
import random
import shutil
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf import UserError
from conf.stage import read_manifest
from data_prep.shards import SPLITS, Shards
from data_prep.vocab import Vocab
from infer import DecodeConfig, DraftConfig, Model, generate, load
from infer.drafters.cost_tables import CostTables
from infer.drafters.costs import prior_costs
from infer.engine.sampling import GREEDY
from tests import warm
from tests.drills.fuzz import mutate
from tests.drills.fuzz.data import check, document, prepared, read_line
from tests.drills.fuzz.setup import TRAINING, call, demo, judged, refused
from train.checkpoint import BrokenFile, list_checkpoints, read_checkpoint, write_checkpoint, write_file
from train.checks import check_adaptive
from train.config import ObjectiveConfig
from train.data import lay_out
from train.export.trained import open_trained
from train.export.weights import CheckpointWeights

COUNT = 5600
MARK = "FUZZ_PICKLE_RAN"  # what a foreign pickle leaves in the environment
NEW = 12
LARGE = 1e6  # no weight of a whole model is near
NEAR = 1e-5  # two logits so alike are a tie, which either order of additions may decide
PROMPTS = ([20, 30, 40, 51], [77, 20, 91])
DRAFTING = ("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json", "manifest.json")
DAMAGED = {  # files of a model directory, as often as they stand here
    "model": 4 * ["adaptive.json"]
    + 3 * ["config.json", "model.safetensors"]
    + 2 * ["tokenizer.json", "generation_config.json"]
    + ["tokenizer_config.json", "manifest.json"],
    "sharded": 2 * ["model.safetensors.index.json"]
    + ["model-00002-of-00003.safetensors", "config.json", "adaptive.json"],
    "gated": 2 * ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adaptive.json"],
}
ADAPTIVE = ("adaptive_ids", "L", "gated", "bos", "infilling", "control")
TEXTS = ("x = 1\n", "<PRE> a <SUF>", "  é😀\t\r\n", "<s></s><adaptive_1>", "def f():\n    return '漢'\n")


def run(rng: random.Random, folder: Path) -> str:
    kinds = (*4 * [shards], *4 * [checkpoint], *5 * [model_directory], *2 * [tokenizer], costs)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(demo() / "costs")):
        os.environ.pop(MARK, None)
        outcome = rng.choice(kinds)(rng, folder)
        assert MARK not in os.environ, "a pickle was run"
    return outcome


def damage(file: Path, rng: random.Random) -> None:
    """Damage a file: its bytes or, where it has a structure, that."""
    data = file.read_bytes()
    file.unlink()  # it may be a link to the whole one
    if rng.random() < 0.05:
        if rng.random() < 0.5:
            file.mkdir()
        return
    if file.suffix == ".safetensors" and rng.random() < 0.7:
        data = _changed_header(data, rng)
    elif file.suffix == ".json" and rng.random() < 0.7:
        with suppress(ValueError):  # damaged by an earlier change
            data = (
                _changed_adaptive(data, rng) if file.name == "adaptive.json" else mutate.changed_json(data, rng)
            )
    else:
        data = mutate.damaged(data, rng)
    file.write_bytes(data)


def _changed_adaptive(data: bytes, rng: random.Random) -> bytes:
    tree = json.loads(data)
    inner = {name: tree[name] for name in ADAPTIVE if name in tree}
    for _ in range(rng.choice((1, 1, 2))):
        mutate.change(inner, rng)
    return json.dumps({name: tree[name] for name in tree if name not in ADAPTIVE} | inner).encode()


def _changed_header(data: bytes, rng: random.Random) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(4)
    if kind == 0:
        size = rng.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", size) + header + body
    header = mutate.damaged(header, rng) if kind == 1 else mutate.changed_json(header, rng)
    return struct.pack("<Q", len(header)) + header + body


def shards(rng: random.Random, folder: Path) -> str:
    """Read a data folder with one or two files damaged, or exchanged for another shard's."""
    out = folder / "data"
    shutil.copytree(demo() / "data", out)
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice([*sorted(out.glob("*.npy")), out / "manifest.json"])
        kind = rng.random()
        if kind < 0.2 and path.is_file():
            content = path.read_bytes()
            rng.choice(sorted(item for item in out.glob("*.npy") if item.is_file())).write_bytes(content)
        elif kind < 0.4 and path.suffix == ".npy" and path.is_file():
            with suppress(ValueError):  # damaged by an earlier change
                _change_array(rng, path)
        elif path.is_file():
            damage(path, rng)
    if rng.randrange(20) == 0:
        return call("data_prep.inspect", [f"out={out}", "inspect.html=true"], rng).outcome
    split, objective = rng.choice(SPLITS), ObjectiveConfig()
    try:
        vocab = Vocab.from_json(read_manifest(out, "shards", "data.path")["vocab"])
        check_adaptive(str(out), vocab, objective)
        actual = Shards(out, split)
        content = _content(actual)
        lay_out([actual[0]], [0], vocab, objective, seed=(0,))
    except UserError as refusal:
        return refused(refusal) if " got " in str(refusal) else "refused"
    assert content == _original(split), "other sequences are read"
    assert vocab == Vocab.from_json(read_manifest(demo() / "data", "shards", "out")["vocab"])
    return "fine"


def _change_array(rng: random.Random, path: Path) -> None:
    array = np.array(np.load(path))
    kind = rng.randrange(4)
    if kind == 0:
        row = rng.randrange(len(array))
        flipped = bytearray(array[row].tobytes())
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        array[row] = np.frombuffer(bytes(flipped), array.dtype).reshape(array[row].shape)
    elif kind == 1:
        array = array[:: rng.choice((-1, 2))]
    elif kind == 2:
        other = rng.choice((np.float32, np.uint64, ">u2"))
        array = array.view(np.uint8) if array.dtype.names else array.astype(other)
    else:
        array = array[..., None] if rng.random() < 0.5 else np.asfortranarray(array)
    np.save(path, array)


def _content(actual: Shards) -> list[tuple[bytes, bytes, list[str], list[int]]]:
    return [(item.tokens.tobytes(), item.spans.tobytes(), item.ids, item.documents.tolist()) for item in actual]


@functools.cache
def _original(split: str) -> list[tuple[bytes, bytes, list[str], list[int]]]:
    return _content(Shards(demo() / "data", split))


def tokenizer(rng: random.Random, folder: Path) -> str:
    """Prepare a few documents by a tokenizer with one file damaged."""
    shutil.copytree(demo() / "data" / "tokenizer", folder / "tokenizer")
    damage(rng.choice(sorted(path for path in (folder / "tokenizer").iterdir() if path.is_file())), rng)
    (folder / "in").mkdir()
    lines = [json.dumps({"content": text}) for text in (*TEXTS, document(rng).replace("\0", ""))]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines))
    options = ["workers=1", "max_unreadable=1.0", "decontaminate.humaneval=null", "data.split_chars=null"]
    options += [f"filters.{name}=null" for name in ("mean_line", "longest_line", "alphanumeric")]
    options += ["held_out=0.3", f"seq_len={rng.choice((16, 100))}", f"tokenizer={folder / 'tokenizer'}"]
    result = prepared(("data=jsonl", "vocab=demo", "tokenizer=t"), folder, options, rng)
    if result.refusal:
        assert not (folder / "out").exists(), "a refused folder is visible"
        return "refused"
    expected = {f"a.jsonl:{row}": (read_line(line.encode(), row), "none") for row, line in enumerate(lines)}
    check(folder / "out", expected, split=False)
    return "fine"


def checkpoint(rng: random.Random, folder: Path) -> str:
    """Read a training with one or two files damaged or forged: by the library, by export, by train."""
    training = folder / "training"
    without = shutil.ignore_patterns("wandb")
    shutil.copytree(demo() / "training", training, copy_function=os.link, ignore=without)
    read = rng.choice((*28 * [_read_training], _export, _resume))
    if read is _resume:
        (training / "manifest.json").unlink()
        _unlinked(training / "log.jsonl").write_bytes((demo() / "training" / "log.jsonl").read_bytes())
    steps = sorted((training / "checkpoints").iterdir())
    for _ in range(rng.choice((1, 1, 2))):
        step, kind = rng.choice((steps[-1], steps[-1], *steps)), rng.randrange(12)
        if kind == 0:
            shutil.rmtree(step, ignore_errors=True)
        elif kind == 1:
            _forge(step, rng)
        elif step.is_dir():
            names = ("manifest.json", "run.json", "log.jsonl", "model/config.json", "model/tokenizer.json")
            beside = [path for name in names if (path := training / name).is_file()]
            damage(rng.choice([*(path for path in step.iterdir() if path.is_file()), *beside]), rng)
    return read(training, folder, rng)


def _unlinked(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


class Foreign:
    def __reduce__(self) -> tuple[object, tuple[str, dict[str, str]]]:
        return exec, (f"import os; os.environ[{MARK!r}] = '1'", {})


def _forge(step: Path, rng: random.Random) -> None:
    try:
        record = read_checkpoint(step)
        name = rng.choice(sorted(record.files))
        value = torch.load(step / name, weights_only=False)
    except (BrokenFile, OSError):  # damaged before
        return
    value[rng.choice(list(value))] = Foreign()
    record.files[name] = write_file(value if rng.random() < 0.5 else Foreign(), _unlinked(step / name))
    _unlinked(step / "checkpoint.json")
    write_checkpoint(step, record)


def _read_training(training: Path, folder: Path, rng: random.Random) -> str:
    try:
        trained = open_trained(str(training))
        weights = dict(trained.weights(torch.float32))
    except UserError as refusal:
        return refused(refusal)
    _check_weights(weights, trained.checkpoint.step)
    return "fine" if trained.checkpoint.step == 6 else "an earlier one"


def _export(training: Path, folder: Path, rng: random.Random) -> str:
    out = folder / "model"
    arguments = [f"checkpoint={training}", f"out={out}", "dtype=float32", "verify=false"]
    if call("train.export", [*arguments, "tracker.mode=disabled"], rng).refusal:
        assert not out.exists(), "a refusal left a directory"
        return "refused"
    step = json.loads((out / "manifest.json").read_text())["step"]
    whole = (demo() / "model" / "model.safetensors").read_bytes()
    assert step != 6 or (out / "model.safetensors").read_bytes() == whole, "other weights"
    return "fine" if step == 6 else "an earlier one"


def _resume(training: Path, folder: Path, rng: random.Random) -> str:
    arguments = [*TRAINING, f"data.path={demo() / 'data'}", f"out={training}"]
    # In its own process: a process group that has ended cannot begin again in this one.
    process = warm.run_ranks("train", *arguments, ranks=1)
    if judged(process.returncode, process.stdout, process.stderr).refusal:
        return "refused"
    newest = list_checkpoints(training / "checkpoints")[0]
    assert newest.name == "step-000006" and (training / "manifest.json").is_file(), "it is not finished"
    _check_weights(dict(CheckpointWeights(newest)), 6)
    return "fine"


def _check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    original = _weights(step)
    assert weights.keys() == original.keys(), f"step {step}: {weights.keys() ^ original.keys()}"
    for name, tensor in original.items():
        assert torch.equal(weights[name], tensor), f"step {step}: {name} is another"


@functools.cache
def _weights(step: int) -> dict[str, Tensor]:
    return dict(CheckpointWeights(demo() / "training" / "checkpoints" / f"step-{step:06}"))


def model_directory(rng: random.Random, folder: Path) -> str:
    """Decode with a model directory one of whose files is damaged: by the API, by the command, as a draft."""
    kind = rng.choice(("model", "model", "model", "sharded", "gated"))
    model, name = folder / "model", rng.choice(DAMAGED[kind])
    shutil.copytree(demo() / kind, model, ignore=shutil.ignore_patterns("custom_generate", "README.md"))
    damage(model / name, rng)
    try:
        return rng.choice((*3 * [_decode], _infer, _infer, _draft))(model, name, kind, rng)
    except UserError as refusal:
        return refused(refusal)


def _decode(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    model = load(folder, "float32", "cpu")
    plain = tokens(model, DecodeConfig("plain", max_new_tokens=NEW))
    lookup = DecodeConfig("prompt_lookup", max_new_tokens=NEW)
    assert tokens(model, lookup) == plain, "prompt lookup changed a text"
    if model.adaptive and not overflows(model):
        drafted = DecodeConfig("sdsat", max_new_tokens=NEW, probes=rng.choice(("root", "all")))
        assert tokens(model, drafted) == plain, "drafts changed a text"
    if name.rpartition("/")[2] in DRAFTING:
        assert plain == _untouched(kind), "a file that says nothing of tokens changed a text"
    reference = _by_library(folder, model)
    assert reference in (None, plain), f"the library's own forward wrote {reference}, we {plain}"
    return "fine"


def _infer(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    arguments = [f"model={folder}", "prompt=def f(x):\n    return", "dtype=float32", "device=cpu"]
    arguments.append(f"decode.max_new_tokens={NEW}")
    result = call("infer", arguments, rng)
    if not result.refusal:
        plain = call("infer", [*arguments, "decode=plain"], rng).stdout
        assert plain == result.stdout, f"drafts changed {plain!r} into {result.stdout!r}"
    return result.outcome


def _draft(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    method = rng.choice(("ssd", "tsd", "gsd"))
    draft = DraftConfig(str(folder), adaptive=rng.random() < 0.3)
    model = load(demo() / "model", "float32", "cpu", draft=draft)
    decode = DecodeConfig(method, nodes=rng.choice((1, 5)), max_new_tokens=NEW)
    assert tokens(model, decode) == _untouched("model"), "a draft model changed a text"
    return "fine"


def overflows(model: Model) -> bool:
    """Return whether a probe's row may be infinite: times 0 that is NaN, in rows that see nothing of it."""
    tensors = model.lm.state_dict().values()
    return any(not tensor.abs().max() < LARGE for tensor in tensors if tensor.is_floating_point())


def tokens(model: Model, decode: DecodeConfig) -> list[list[int]]:
    rows = [list[int]() for _ in PROMPTS]
    for step in generate(model, PROMPTS, decode):
        rows[step.sequence] += step.tokens
    return rows


@functools.cache
def _untouched(kind: str) -> list[list[int]]:
    return tokens(load(demo() / kind, "float32", "cpu"), DecodeConfig("plain", max_new_tokens=NEW))


def _by_library(folder: Path, model: Model) -> list[list[int]] | None:
    """Return the likeliest tokens by the library's forward over the whole text; None where it does not read the
    directory, or two tokens are equally likely.
    """
    logging.disable()
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception:
        return None
    finally:
        logging.disable(logging.NOTSET)
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + NEW and not set(ids[len(prompt) :]) & model.eos:
            with torch.inference_mode():
                logits = lm(torch.tensor([ids])).logits[0, -1]
            first, second = logits.topk(2).values
            if not logits.isfinite().all() or first - second <= NEAR * first.abs():
                return None
            ids.append(int(logits.argmax()))
        rows.append(ids[len(prompt) :])
    return rows


def costs(rng: random.Random, folder: Path) -> str:
    """Decode with a damaged table of costs, which changes no text."""
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)):
        model = load(demo() / "model", "float32", "cpu")
        CostTables(model.lm, batch=len(PROMPTS), capacity=32, sampling=GREEDY).save(prior_costs("cpu"))
        for file in (folder / "adaptive-tokens").iterdir():
            data = file.read_bytes()
            file.write_bytes(
                mutate.changed_json(data, rng) if rng.random() < 0.5 else mutate.damaged(data, rng)
            )
        actual = tokens(model, DecodeConfig("sdsat", max_new_tokens=NEW))
    assert actual == _untouched("model"), "a table of costs changed a text"
    return "fine"
