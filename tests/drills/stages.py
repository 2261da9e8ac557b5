"""Every stage that writes: its command on tiny inputs, and which parts of its result are the same each time.

Results are equal byte for byte except for dates, measured times and what follows from them, and the commit,
which git shows its owner only. A view returns what is compared of a file.
"""

import json
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.files import CHECKSUM

View = Callable[[Path], Any]
QUIET = "tracker.mode=disabled"
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = [f"model.shape.{name}={value}" for name, value in (SHAPE | {"num_key_value_heads": 2}).items()]
SHORT = ["steps=12", "save_every=3", "validate_every=4", "validate_sequences=4", "optimizer.warmup_steps=1"]
BATCH = ["global_batch=4", "micro_batch=2", "keep_last=2"]
UNITS = ("decoder", "k", "tokens", "text")
# Of a row of speed: what no clock decides. Drafts of LEARNING hang on measured times.
KEYS = ("prompt_set", "dtype", "temperature", "decoder", "k", "prompts", "rounds", "identical", "compared")
COUNTED = ("tokens", "forwards", "drafted", "rows_per_forward", "acceptance_rate", "acceptance_by_position")
LEARNING = ("adaptive", "auto", "ngrams")


@dataclass(frozen=True)
class Stage:
    """`command` receives the folder of finished results. `views`: what is compared of files by a pattern of
    their path, where it is not every byte; None: nothing. `folders` are visible complete or not at all. Files
    of `passing` are visible while it runs only, those of `growing` not yet as in the result.
    """

    name: str
    command: Callable[[Path], list[str]]
    needs: tuple[str, ...] = ()
    ranks: int = 1
    out: str = "out"
    setting: str = "out"
    views: Mapping[str, View | None] = field(default_factory=dict)
    folders: tuple[str, ...] = ("out",)
    passing: tuple[str, ...] = ()
    growing: tuple[str, ...] = ()
    begin: Callable[[Path, Path], None] | None = None  # fills the run's folder before

    def arguments(self, finished: Path, run: Path) -> list[str]:
        """Return the module and its settings, for a result in the folder `run`."""
        return [*self.command(finished), f"{self.setting}={run / self.out}"]

    @property
    def result(self) -> str:
        """Return the file or folder below `run` that is there when it has ended well."""
        return self.folders[0] if len(self.folders) == 1 else self.out


def without(*names: str) -> View:
    """Return a view of JSON, or JSON lines, without these names and the checksum.

    Of a text in pieces it has the text: which pieces were drafted hangs on what a policy has measured.
    """

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            value = value | {"pieces": _text_of(value)} if "pieces" in value else value
            return {name: strip(inner) for name, inner in value.items() if name not in names}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    def view(path: Path) -> Any:
        text = path.read_text(encoding="utf-8")
        rows = [strip(json.loads(row)) for row in ([text] if path.suffix == ".json" else text.splitlines())]
        return [{name: value for name, value in row.items() if name != CHECKSUM} for row in rows]

    return view


def _text_of(sample: dict[str, Any]) -> str:
    return "".join(text for _, text in sample["pieces"])


def without_text(pattern: str) -> View:
    return lambda path: re.sub(pattern, "", path.read_text(encoding="utf-8"))


def exists(path: Path) -> Any:
    return True


def _speed_json(path: Path) -> Any:
    speed = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in speed["rows"]:
        names = (*KEYS, *COUNTED[: 1 if row["decoder"] in LEARNING else None])
        rows.append({name: row[name] for name in names})
    return (
        rows,
        [{**item, "pieces": _text_of(item)} for item in speed["samples"]],
        speed["units"],
        speed["settings"],
    )


def _speed_unit(path: Path) -> Any:
    groups = json.loads(path.read_text(encoding="utf-8")).get("groups", [])
    return sorted(tuple(run[name] for name in UNITS) for group in groups for b in group["blocks"] for run in b)


def _gpu_check(path: Path) -> Any:
    check = json.loads(path.read_text(encoding="utf-8"))
    del check["versions"]["commit"]
    names = ("finished", "parity", "hardware", "versions", "settings")
    return {name: check[name] for name in names} | {"shapes": sorted(check.get("shapes", ()))}


MANIFEST = without("created", "commit", "seconds")
UNCOMMITTED = without_text(r"commit \w+")
PAGE = without_text(r"Made .* by commit \S+|\d+ tokens/s, |first token after [\d.]+ s")
MEASURED: dict[str, View | None] = {
    **dict.fromkeys(("out/*.png", "out/*.csv", "out/report.json", "out/index.html"), exists),
    "*/manifest.json": MANIFEST,
    "*/speed.json": _speed_json,
    "*/speed/units/*": _speed_unit,
    "*/speed/header.json": without("date", "commit", "costs", "limits"),
    "*/quality.json": without("date", "commit"),
    "*/quality/header.json": without("date", "commit"),
    "*/quality/units/*": without(),
}
ON_MODEL = ("export", "data_prep-1")


def _data(workers: int) -> Stage:
    files = ["data.include=[json/*.py,email/*.py,logging/*.py]", "data.split_chars=150", "held_out=0.2"]
    sizes = ["vocab.train_size=400", "seq_len=128", "shard_tokens=60000", "near_duplicates=true"]
    settings = ["vocab=demo", f"data.path={sysconfig.get_path('stdlib')}", *files, *sizes, f"workers={workers}"]
    return Stage(
        f"data_prep-{workers}",
        lambda finished: ["data_prep", *settings],
        views={"*/manifest.json": MANIFEST},
        passing=("out/work/*", "out/begun.json"),  # removed at the end, or by the next run
    )


def _train(name: str, *settings: str, ranks: int = 1) -> Stage:
    def command(finished: Path) -> list[str]:
        data = f"data.path={finished}/data_prep-1/out"
        return ["train", "experiment=demo", "model=demo", *TINY, *SHORT, *BATCH, data, *settings]

    views = {"*/manifest.json": MANIFEST, "*/log.jsonl": without("tokens_per_second", "memory_gib")}
    if QUIET not in settings:  # W&B draws an id, and has a folder for every start
        views |= {"*/checkpoint.json": without("run_id", "crc32"), "out/wandb/*": None}
    growing = {"passing": ("out/checkpoints/step-*",), "growing": ("out/log.jsonl",)}
    return Stage(name, command, ("data_prep-1",), ranks, views=views, folders=(), **growing)


def _export(name: str, training: str, *settings: str) -> Stage:
    def command(finished: Path) -> list[str]:
        return ["train.export", f"checkpoint={finished}/{training}/out", "verify_sequences=2", QUIET, *settings]

    views = {"*/manifest.json": MANIFEST, "*/README.md": UNCOMMITTED, "*/custom_generate/*.py": UNCOMMITTED}
    return Stage(name, command, (training,), views=views)


def _prompts(finished: Path, count: int) -> list[str]:
    held_out = f"path={finished}/data_prep-1/out/held_out.jsonl"
    settings = (held_out, f"count={count}", "max_tokens=60", "key=content", "share=0.5")
    return ["prompts=", *(f"prompts.held_out.{setting}" for setting in settings)]


def _speed(finished: Path) -> list[str]:
    cells = ["decoders=[sdsat,auto,prompt_lookup]", "peers=[]", "k=[1,3]", "temperatures=[0,1]"]
    sizes = ["dtypes=[float32]", "rounds=2", "max_new_tokens=16", "threads=1", QUIET]
    return ["infer.speed", f"model={finished}/export/out", *_prompts(finished, 3), *cells, *sizes]


def _quality(finished: Path) -> list[str]:
    held_out = (f"path={finished}/data_prep-1/out/held_out.jsonl", "kind=lines", "count=4")
    benchmarks = ["benchmarks=humaneval", "benchmarks.humaneval.count=3"]
    benchmarks += [f"+benchmarks.held_out.{setting}" for setting in held_out]
    sizes = ["samples=2", "k=[1]", "dtype=float32", "max_new_tokens=12", "batch=2", "threads=1", QUIET]
    return ["infer.quality", f"model={finished}/export/out", *benchmarks, *sizes]


def _study(finished: Path) -> list[str]:
    parts = ["parts=[recurrence,merging]", "max_new_tokens=8", "draft=self:1"]  # those without a clock
    return ["infer.study", f"model={finished}/export/out", *_prompts(finished, 2), *parts]


def _regenerate(finished: Path) -> list[str]:
    folders = [f"model={finished}/export/out", f"data.path={finished}/data_prep-1/out"]
    sizes = ["documents=12", "batch=2", "prefix_min=4", "prefix_max=12", "threads=1", "dtype=float32"]
    return ["infer.regenerate", *folders, *sizes, "decode.max_new_tokens=16", "decode.temperature=1"]


def _measured(name: str, kind: str, command: Callable[[Path], list[str]], ranks: int = 1) -> Stage:
    folder = f"out/{kind}"
    passing = (f"{folder}/begun.json",)  # removed at the end, or by the next run
    return Stage(name, command, ON_MODEL, ranks, views=MEASURED, folders=(folder,), passing=passing)


def _copy_measured(finished: Path, run: Path) -> None:
    for kind in ("speed", "quality"):
        shutil.copytree(finished / kind / "out" / kind, run / "out" / kind)


def _infer(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda finished: [
        arguments[0],
        f"model={finished}/export/out",
        "prompt=import torch",
        *arguments[1:],
    ]


def _stages() -> Iterator[Stage]:
    yield from (_data(1), _data(2))
    yield _train("train", QUIET)
    yield _train("train-2", QUIET, "deepspeed=zero2", ranks=2)
    yield _train("train-lora", QUIET, "lora.rank=4")
    yield _train("train-tracked", "tracker.mode=offline")
    yield _export("export", "train", "dtype=float32")
    yield _export("export-shards", "train", "dtype=bfloat16", "shard_size=20KB")
    yield _export("export-lora", "train-lora", "lora=kept")
    yield from (_measured("speed", "speed", _speed), _measured("speed-2", "speed", _speed, 2))
    yield _measured("quality", "quality", _quality)
    study = {"*/manifest.json": MANIFEST, "*/report.json": without("date", "commit")}
    yield Stage("study", _study, ON_MODEL, views=study)
    for name, ranks in {"regenerate": 1, "regenerate-2": 2}.items():
        passing = ("out/units/*", "out/begun.json")  # removed at the end, or by the next run
        yield Stage(name, _regenerate, ON_MODEL, ranks, views={"*/manifest.json": MANIFEST}, passing=passing)
    yield Stage("graph", _infer("infer.graph", "draft=self:1"), ("export",), out="graph.png")
    decode = ["decode=sdsat", "decode.probes=all", "decode.k=2", "dtype=float32"]  # the page shows its drafts
    yield Stage(
        "page",
        _infer("infer", *decode),
        ("export",),
        out="page.html",
        setting="html",
        views={"page.html": PAGE},
    )
    check = ["infer.gpu_check", "device=cpu", "shapes=[tiny]", "k=[3]", "context=64", "rounds=3", "prompts=2"]
    yield Stage(
        "gpu_check",
        lambda finished: [*check, "compile=false"],
        out="check.json",
        views={"check.json": _gpu_check},
        growing=("check.json",),
    )
    yield Stage(
        "report",
        lambda finished: ["infer.report", QUIET],
        ("speed", "quality"),
        views={"out/index.html": PAGE, "out/report.json": without("date", "commit")},
        folders=("out/speed", "out/quality"),
        begin=_copy_measured,
    )


STAGES = {stage.name: stage for stage in _stages()}
