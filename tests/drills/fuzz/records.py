"""Rows of benchmarks, changed; and measurements, finished or not, with a file damaged.

A row that is whole gives its problem. A damaged record is refused, or its unit is measured again with the same
counts.
"""

import contextlib
import functools
import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from conf import UserError, settings
from infer.benchmarks import PromptSetConfig
from infer.benchmarks.prompts import load_prompts
from infer.models.checkpoint import load_text
from infer.quality import QualityConfig
from infer.quality import run as quality
from infer.report.write import build
from infer.speed import SpeedConfig
from infer.speed import run as speed
from tests.drills.fuzz import mutate
from tests.drills.fuzz.setup import call, demo, refused

COUNT = 3000
CODE = {"task_id": "a/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n"}
HOLE = {"task_id": "a/0", "prompt": "a = 1\n", "suffix": "print(a)\n", "canonical_solution": "a += 1\n"}
SHELL = {"name": "a_0", "language": "sh", "prompt": "f() {\n", "tests": "}\nrun_test\n", "stop_tokens": ["\n}"]}
ROWS: dict[str, dict[str, Any]] = {
    "humaneval": CODE | {"test": "def check(f):\n    assert f(1) == 1\n"},
    "mbpp": {
        "task_id": 11,
        "prompt": "Return x.",
        "code": "def f(x):\r\n    return x",
        "test_list": ["assert f(1)"],
    },
    "multipl_e": SHELL,
    "infilling": HOLE,
    "lines": {"content": "a = 1\nb = 2\nprint(a)\n", "id": "a", "language": "python"},
    "gsm8k": {"question": "How many?", "answer": "4"},
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]},
    "alpaca": {"instruction": "Name it.", "instances": [{"input": "this", "output": "it"}]},
    "xsum": {"document": "It rained."},
    "wmt14": {"translation": {"en": "It rains.", "de": "Es regnet."}},
    "jsonl": {"prompt": "import json\n", "path": "x.py"},
}
IDS = {"humaneval": "task_id", "infilling": "task_id", "multipl_e": "name"}
INDEPENDENT = ("jsonl", "gsm8k", "xsum", "wmt14", "alpaca", "lines")  # a row's prompt needs no other row
# Of a row of speed: what no clock decides.
COUNTED = ("prompt_set", "dtype", "temperature", "decoder", "k", "tokens", "forwards", "drafted", "identical")
SCORED = ("benchmark", "language", "who", "decoder", "metric", "value", "problems", "samples")


def run(rng: random.Random, folder: Path) -> str:
    with patch.dict(os.environ, XDG_CACHE_HOME=str(demo() / "costs")):
        return rng.choice((*12 * [benchmark], *6 * [report], resume))(rng, folder)


def benchmark(rng: random.Random, folder: Path) -> str:
    """Read some rows of which some are changed, from a file whose bytes may be damaged."""
    kind = rng.choice(list(ROWS))
    rows = [json.loads(json.dumps(ROWS[kind])) for _ in range(rng.choice((1, 2, 5)))]
    for n, row in enumerate(rows):
        row |= {IDS[kind]: f"a/{n}"} if kind in IDS else {"task_id": 11 + n} if kind == "mbpp" else {}
    whole = len(rows) - (changed := rng.randrange(len(rows) + 1))
    for row in rows[:changed]:
        mutate.change(row, rng)
    path, damaged = _write(rows, rng, folder)
    try:
        prompts = [prompt.before for prompt in _prompts(kind, path)]
    except UserError as refusal:
        return refused(refusal)
    if not damaged and kind in INDEPENDENT:
        assert prompts.count(_whole_prompt(kind)) >= whole, f"{whole} rows are whole, read {prompts}"
    return "fine"


def _write(rows: list[Any], rng: random.Random, folder: Path) -> tuple[Path, bool]:
    kind = rng.choice(("jsonl", "jsonl", "json", "parquet", "gz"))
    path = folder / ("rows.jsonl.gz" if kind == "gz" else f"rows.{kind}")
    lines = "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows)
    data = lines.encode("utf-8", "surrogatepass")
    if kind == "json":
        data = json.dumps(rows).encode()
    elif kind == "gz":
        data = gzip.compress(data)
    elif kind == "parquet":
        with contextlib.suppress(pa.ArrowException, UnicodeError, OverflowError):
            pq.write_table(pa.Table.from_pylist(rows), path)
        data = path.read_bytes() if path.is_file() else b""
    damaged = rng.random() < 0.3
    path.write_bytes(mutate.damaged(data, rng) if damaged else data)
    return path, damaged or kind == "parquet"


def _prompts(kind: str, path: Path) -> list[Any]:
    config = PromptSetConfig(kind=kind, path=str(path), count=None)
    return load_prompts("mine", config, _text(), seed=0)


@functools.cache
def _text() -> Any:
    return load_text(demo() / "model")


@functools.cache
def _whole_prompt(kind: str) -> str:
    path = demo() / f"{kind}.jsonl"
    path.write_text(json.dumps(ROWS[kind]))
    return _prompts(kind, path)[0].before


def report(rng: random.Random, folder: Path) -> str:
    """Build a report of damaged measurements: what is reported is what was measured, or nothing is."""
    kind, finished = rng.choice(("speed", "quality")), rng.random() < 0.6
    out = folder / "report"
    shutil.copytree(measured(finished), out)
    place = out / (kind if finished else f".{kind}.partial")
    first, more = ("manifest.json", [place / f"{kind}.json"]) if finished else ("header.json", _units(place))
    _damage(rng.choice([place / first, *3 * more]), rng)
    if rng.random() < 0.03:
        return call("infer.report", [f"out={out}", "tracker.mode=disabled"], rng).outcome
    try:
        built = build(out)
    except UserError as refusal:
        return refused(refusal)
    for name in ("speed", "quality"):
        assert built[name] is None or built[name]["rows"] == _report(finished)[name]["rows"], "other figures"
    return "fine"


def resume(rng: random.Random, folder: Path) -> str:
    """Go on with an interrupted measurement from a damaged folder: to the counts that it would have had."""
    kind, out = rng.choice(("speed", "quality")), folder / "report"
    shutil.copytree(measured(False), out)
    place = out / f".{kind}.partial"
    _damage(rng.choice([place / "begun.json", place / "header.json", *3 * _units(place)]), rng)
    arguments = _speed_arguments(out) if kind == "speed" else _quality_arguments(out)
    if call(f"infer.{kind}", arguments, random.Random(1)).refusal:
        return "refused"
    names = COUNTED if kind == "speed" else SCORED
    rows = json.loads((out / "report.json").read_text())[kind]["rows"]
    whole = _report(True)[kind]["rows"]
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in whole]
    return "fine"


def _units(place: Path) -> list[Path]:
    return sorted((place / "units").iterdir())


def _damage(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(mutate.changed_json(data, rng) if rng.random() < 0.5 else mutate.damaged(data, rng))


@functools.cache
def measured(finished: bool) -> Path:
    """Return a folder with both measurements, interrupted right before the result; or finished."""
    out = demo() / ("report" if finished else "interrupted")
    if finished:
        shutil.copytree(measured(False), out)
    (demo() / "texts.jsonl").write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):\n"}) for n in range(2)))
    rows = [HOLE | {"task_id": f"a/{n}", "prompt": f"a = {n}\n"} for n in range(3)]
    (demo() / "holes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for module, measure, last, schema, arguments in (
        (speed, speed.measure_speed, "read", SpeedConfig, _speed_arguments(out)),
        (quality, quality.measure_quality, "result", QualityConfig, _quality_arguments(out)),
    ):
        stop = (
            contextlib.nullcontext() if finished else patch.object(module, last, side_effect=KeyboardInterrupt)
        )
        with contextlib.suppress(*() if finished else (KeyboardInterrupt,)), stop:
            measure(settings(module.__name__.split(".")[1], schema, arguments))
    return out


def _speed_arguments(out: Path) -> list[str]:
    prompts = ["prompts=null", f"prompts.mine.path={demo() / 'texts.jsonl'}", "prompts.mine.count=2"]
    cells = ["k=[2]", "temperatures=[0]", "dtypes=[float32]", "decoders=[sdsat,prompt_lookup]", "peers=[]"]
    sizes = ["rounds=1", "threads=1", "max_new_tokens=6", "tracker.mode=disabled"]
    return [f"model={demo() / 'model'}", f"out={out}", *prompts, *cells, *sizes]


def _quality_arguments(out: Path) -> list[str]:
    benchmarks = ["benchmarks=infilling", f"benchmarks.infilling.path={demo() / 'holes.jsonl'}"]
    sizes = ["dtype=float32", "threads=1", "max_new_tokens=6", "batch=2", "tracker.mode=disabled"]
    return [f"model={demo() / 'model'}", f"out={out}", *benchmarks, *sizes]


@functools.cache
def _report(finished: bool) -> dict[str, Any]:
    return build(measured(finished))
