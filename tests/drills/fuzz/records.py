"""What is read beside models: benchmarks, records of unfinished measurements, reports, tables of costs.

A record is sealed: what comes of a damaged one is a refusal, a unit done again with the same counts, or, for a
table of costs, another measurement. A row of a benchmark that was not touched gives the problem that it always
gives.
"""

import contextlib
import functools
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from conf import UserError, settings
from infer import DecodeConfig
from infer.benchmarks.config import PromptSetConfig
from infer.benchmarks.prompts import load_prompts
from infer.drafters.cost_tables import CostTables
from infer.drafters.costs import prior_costs
from infer.engine.sampling import GREEDY
from infer.models.checkpoint import load_text
from infer.quality import run as quality
from infer.quality.config import QualityConfig
from infer.report.write import build
from infer.speed import run as speed
from infer.speed.config import SpeedConfig
from tests.drills.fuzz import mutate
from tests.drills.fuzz.command import call
from tests.drills.fuzz.model_directories import refused
from tests.drills.fuzz.prompts import model, tokens
from tests.drills.fuzz.tiny import made

COUNT = 3000
ROWS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "task_id": "a/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(f):\n    assert f(1) == 1\n",
    },
    "mbpp": {
        "task_id": 11,
        "prompt": "Return x.",
        "code": "def f(x):\r\n    return x",
        "test_list": ["assert f(1)"],
    },
    "multipl_e": {
        "name": "a_0",
        "language": "sh",
        "prompt": "f() {\n",
        "tests": "}\nrun_test\n",
        "stop_tokens": ["\n}"],
    },
    "infilling": {
        "task_id": "a/0",
        "prompt": "a = 1\n",
        "suffix": "print(a)\n",
        "canonical_solution": "a += 1\n",
    },
    "lines": {"content": "a = 1\nb = 2\nprint(a)\n", "id": "a", "language": "python"},
    "gsm8k": {"question": "How many?", "answer": "4"},
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]},
    "alpaca": {"instruction": "Name it.", "instances": [{"input": "this", "output": "it"}]},
    "xsum": {"document": "It rained."},
    "wmt14": {"translation": {"en": "It rains.", "de": "Es regnet."}},
    "jsonl": {"prompt": "import json\n", "path": "x.py"},
}
# Of a row of speed: what no clock decides.
COUNTED = ("prompt_set", "dtype", "temperature", "decoder", "k", "tokens", "forwards", "drafted", "identical")
SCORED = ("benchmark", "language", "who", "decoder", "metric", "value", "problems", "samples")


def run(rng: random.Random, folder: Path) -> str:
    """One file of a benchmark, one damaged record, or one damaged table."""
    specs: list[Callable[[random.Random, Path], str]] = [
        *12 * [by_rows],
        *6 * [by_report],
        by_resuming,
        by_costs,
    ]
    return rng.choice(specs)(rng, folder)


def by_rows(rng: random.Random, folder: Path) -> str:
    """A file of some rows, of which some are changed, or of which the bytes are."""
    kind = rng.choice(list(ROWS))
    rows = [{**json.loads(json.dumps(ROWS[kind])), **_id(kind, n)} for n in range(rng.choice((1, 2, 5)))]
    whole = [json.dumps(row) for row in rows]
    for row in rows[: rng.randrange(len(rows) + 1)]:
        mutate.changed(row, rng)
    path, damaged = _written(rows, rng, folder)
    kept = [text for text, row in zip(whole, rows) if json.dumps(row) == text]
    try:
        found = load_prompts("mine", PromptSetConfig(kind=kind, path=str(path), count=None), _text(), seed=0)
    except UserError as error:
        return refused(error)
    if not damaged and kind in ("jsonl", "gsm8k", "xsum", "wmt14", "alpaca", "lines"):
        before = [prompt.before for prompt in found]
        assert before.count(_before(kind)) >= len(kept), f"{len(kept)} rows are whole, found {before}"
    return "fine"


def _id(kind: str, n: int) -> dict[str, Any]:
    ids = {"humaneval": "task_id", "infilling": "task_id", "multipl_e": "name"}
    return {ids[kind]: f"a/{n}"} if kind in ids else {"task_id": 11 + n} if kind == "mbpp" else {}


@functools.cache
def _before(kind: str) -> str:
    """The text before the new one, of the whole row."""
    folder = made() / "rows"
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.jsonl"
    path.write_text(json.dumps(ROWS[kind]))
    (found,) = load_prompts("mine", PromptSetConfig(kind=kind, path=str(path), count=None), _text(), seed=0)
    return found.before


@functools.cache
def _text() -> Any:
    return load_text(made() / "model")


def _written(rows: list[Any], rng: random.Random, folder: Path) -> tuple[Path, bool]:
    """The file, and whether its bytes were damaged."""
    kind = rng.choice(("jsonl", "jsonl", "json", "parquet", "gz"))
    path = folder / ("rows.jsonl.gz" if kind == "gz" else f"rows.{kind}")
    lines = "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows)
    data = lines.encode("utf-8", "surrogatepass")
    if kind == "json":
        data = json.dumps(rows).encode()
    if kind == "parquet":
        with contextlib.suppress(pa.ArrowException, UnicodeError, OverflowError):
            pq.write_table(pa.Table.from_pylist(rows), path)
        data = path.read_bytes() if path.is_file() else b""
    if kind == "gz":
        data = gzip.compress(data)
    damaged = rng.random() < 0.3
    path.write_bytes(mutate.damaged(data, rng) if damaged else data)
    return path, damaged or kind == "parquet"


def by_report(rng: random.Random, folder: Path) -> str:
    """A damaged file of finished or unfinished measurements: what is reported is what was, or nothing is."""
    kind, finished = rng.choice(("speed", "quality")), rng.random() < 0.6
    out = folder / "report"
    shutil.copytree(measured(finished), out)
    file = _damaged_one(out / (kind if finished else f".{kind}.partial"), kind, rng, finished=finished)
    if rng.random() < 0.03:
        return call("infer.report", [f"out={out}", "tracker.mode=disabled"], rng).outcome
    try:
        report = build(out)
    except UserError as error:
        return refused(error)
    wanted = reported(finished)
    for name in ("speed", "quality"):
        assert report[name] is None or report[name]["rows"] == wanted[name]["rows"], (
            f"{file.name}: other figures"
        )
    return "fine"


def _damaged_one(place: Path, kind: str, rng: random.Random, *, finished: bool) -> Path:
    """One of the files that are read there, its bytes damaged, or its JSON."""
    if finished:
        files = [place / "manifest.json", *3 * [place / f"{kind}.json"]]
    else:
        files = [place / "header.json", *sorted((place / "units").iterdir())]
    file = rng.choice(files)
    data = file.read_bytes()
    file.write_bytes(mutate.changed_json(data, rng) if rng.random() < 0.5 else mutate.damaged(data, rng))
    return file


def by_resuming(rng: random.Random, folder: Path) -> str:
    """An interrupted measurement goes on from a damaged folder: with the counts that it would have had."""
    kind = rng.choice(("speed", "quality"))
    out = folder / "report"
    shutil.copytree(measured(False), out)
    place = out / f".{kind}.partial"
    file = rng.choice([place / "begun.json", place / "header.json", *3 * sorted((place / "units").iterdir())])
    data = file.read_bytes()
    file.write_bytes(mutate.changed_json(data, rng) if rng.random() < 0.5 else mutate.damaged(data, rng))
    arguments = speed_arguments(out) if kind == "speed" else quality_arguments(out)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(made() / "costs")):
        ended = call(f"infer.{kind}", arguments, random.Random(1))
    if ended.told:
        return "refused"
    found, names = (
        json.loads((out / "report.json").read_text())[kind]["rows"],
        COUNTED if kind == "speed" else SCORED,
    )
    wanted = reported(True)[kind]["rows"]
    assert [_part(row, names) for row in found] == [_part(row, names) for row in wanted], f"{file.name}: others"
    return "fine"


def _part(row: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    return [row[name] for name in names]


def by_costs(rng: random.Random, folder: Path) -> str:
    """A damaged table of costs changes no text."""
    decode = DecodeConfig("sdsat", max_new_tokens=8)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)):
        cache = folder / "adaptive-tokens"
        shutil.copytree(_tables(), cache)
        for file in cache.iterdir():
            data = file.read_bytes()
            file.write_bytes(
                mutate.changed_json(data, rng) if rng.random() < 0.5 else mutate.damaged(data, rng)
            )
        model().methods._policies.__init__()  # as a new process has none
        plain = DecodeConfig("plain", max_new_tokens=8)
        assert tokens([[20, 30]], decode) == tokens([[20, 30]], plain), "a table of costs changed a text"
    return "fine"


@functools.cache
def _tables() -> Path:
    with patch.dict(os.environ, XDG_CACHE_HOME=str(made() / "tables")):
        CostTables(model().lm, batch=1, capacity=10, sampling=GREEDY).save(prior_costs("cpu"))
    return made() / "tables" / "adaptive-tokens"


@functools.cache
def measured(finished: bool) -> Path:
    """A folder with both measurements, interrupted when all was done but the result; then finished."""
    out = made() / ("report" if finished else "interrupted")
    if finished:
        shutil.copytree(measured(False), out)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(made() / "costs")):
        _measure(out, finished)
    return out


def _measure(out: Path, finished: bool) -> None:
    (made() / "texts.jsonl").write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):\n"}) for n in range(2)))
    rows = [{**ROWS["infilling"], "task_id": f"a/{n}", "prompt": f"a = {n}\n"} for n in range(3)]
    (made() / "holes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    interrupted = contextlib.nullcontext() if finished else contextlib.suppress(KeyboardInterrupt)
    for module, name, schema, arguments in (
        (speed, "read", SpeedConfig, speed_arguments(out)),
        (quality, "result", QualityConfig, quality_arguments(out)),
    ):
        stop = (
            contextlib.nullcontext() if finished else patch.object(module, name, side_effect=KeyboardInterrupt)
        )
        with interrupted, stop:
            module.run(settings(module.__name__.split(".")[1], schema, arguments))


def speed_arguments(out: Path) -> list[str]:
    """Two prompts, one round, two decoders."""
    texts = made() / "texts.jsonl"
    return [
        *(f"model={made() / 'model'}", f"out={out}", "prompts=null", f"prompts.mine.path={texts}"),
        *("prompts.mine.count=2", "k=[2]", "temperatures=[0]", "dtypes=[float32]", "rounds=1", "threads=1"),
        *("decoders=[sdsat,prompt_lookup]", "peers=[]", "max_new_tokens=6", "tracker.mode=disabled"),
    ]


def quality_arguments(out: Path) -> list[str]:
    """Three lines that are missing."""
    holes = made() / "holes.jsonl"
    return [
        *(f"model={made() / 'model'}", f"out={out}", "benchmarks=infilling", "dtype=float32", "threads=1"),
        *(f"benchmarks.infilling.path={holes}", "max_new_tokens=6", "batch=2", "tracker.mode=disabled"),
    ]


@functools.cache
def reported(finished: bool) -> dict[str, Any]:
    """The report of the whole folder."""
    return build(measured(finished))
