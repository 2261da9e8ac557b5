"""Every stage that writes: its command on tiny inputs, and what of its result must be the same each time.

All results must be the same byte for byte, but for what views.py leaves out: dates, times that were measured
and what follows from them, the counters of a machine's memory, and the commit, which git tells its owner alone.
"""

import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.drills.views import LOG, MANIFEST, View, less, page, parity, present, speed, turn, uncommitted

TINY = [
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=2",
    "model.shape.num_attention_heads=2",
    "model.shape.num_key_value_heads=2",
]
SHORT = ["steps=12", "save_every=3", "validate_every=4", "validate_sequences=4", "optimizer.warmup_steps=1"]
BATCH = ["global_batch=4", "micro_batch=2", "keep_last=2"]
QUIET = "tracker.mode=disabled"


@dataclass(frozen=True)
class Stage:
    """`command` is given the folder of whole results. `views`: what is compared of a file, by a pattern of its
    path, where it is not every byte; None: nothing. `folders` are there whole or not at all; what is seen on
    the way, beside what belongs to the result, is `passing`; what is not yet as in the result, `growing`.
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
    begin: Callable[[Path, Path], None] | None = None  # puts into the run's folder what is there before

    def words(self, whole: Path, run: Path) -> list[str]:
        """The module and its settings, for a result in the folder `run`."""
        return [*self.command(whole), f"{self.setting}={run / self.out}"]

    @property
    def result(self) -> str:
        """The file or folder below `run` that is there when it has ended well."""
        return self.folders[0] if len(self.folders) == 1 else self.out


def _data(workers: int) -> Stage:
    files = ["data.include=[json/*.py,email/*.py,logging/*.py]", "data.split_chars=150", "held_out=0.2"]
    sizes = ["vocab.train_size=400", "seq_len=128", "shard_tokens=60000", "near_duplicates=true"]
    settings = ["vocab=demo", f"data.path={sysconfig.get_path('stdlib')}", *files, *sizes, f"workers={workers}"]
    return Stage(
        f"data_prep-{workers}",
        lambda whole: ["data_prep", *settings],
        views={"*/manifest.json": MANIFEST},
        passing=("out/work/*", "out/begun.json"),  # swept by the last act, or by the next run
    )


def _train(name: str, *settings: str, ranks: int = 1) -> Stage:
    def command(whole: Path) -> list[str]:
        data = f"data.path={whole}/data_prep-1/out"
        return ["train", "experiment=demo", "model=demo", *TINY, *SHORT, *BATCH, data, *settings]

    views = {"*/manifest.json": MANIFEST, "*/log.jsonl": LOG}
    if QUIET not in settings:  # W&B draws an id, and has a folder for every start
        views |= {"*/checkpoint.json": less("run_id", "crc32"), "out/wandb/*": None}
    return Stage(
        name,
        command,
        ("data_prep-1",),
        ranks,
        views=views,
        folders=(),
        passing=("out/checkpoints/step-*",),
        growing=("out/log.jsonl",),
    )


def _export(name: str, of: str, *settings: str) -> Stage:
    def command(whole: Path) -> list[str]:
        return ["train.export", f"checkpoint={whole}/{of}/out", "verify_sequences=2", QUIET, *settings]

    views = {"*/manifest.json": MANIFEST, "*/README.md": uncommitted, "*/custom_generate/*.py": uncommitted}
    return Stage(name, command, (of,), views=views)


def _texts(whole: Path, group: str, count: int) -> list[str]:
    held_out = f"{group}.held_out.path={whole}/data_prep-1/out/held_out.jsonl"
    return [f"{group}=", held_out, *(f"{group}.held_out.{one}" for one in (f"count={count}", "max_tokens=60"))]


def _speed(whole: Path) -> list[str]:
    ways = [
        "decoders=[sdsat,auto,prompt_lookup]",
        "peers=[]",
        "k=[1,3]",
        "temperatures=[0,1]",
        "dtypes=[float32]",
    ]
    texts = [*_texts(whole, "prompts", 3), "prompts.held_out.key=content", "prompts.held_out.share=0.5"]
    sizes = ["rounds=2", "max_new_tokens=16", "threads=1", QUIET]
    return ["infer.speed", f"model={whole}/export/out", *texts, *ways, *sizes]


def _quality(whole: Path) -> list[str]:
    held_out = f"+benchmarks.held_out.path={whole}/data_prep-1/out/held_out.jsonl"
    problems = [
        "benchmarks=humaneval",
        "benchmarks.humaneval.count=3",
        "+benchmarks.held_out.kind=lines",
        held_out,
    ]
    sizes = [
        "+benchmarks.held_out.count=4",
        "dtype=float32",
        "max_new_tokens=12",
        "batch=2",
        "threads=1",
        QUIET,
    ]
    return ["infer.quality", f"model={whole}/export/out", *problems, "samples=2", "k=[1]", *sizes]


def _measured(name: str, kind: str, command: Callable[[Path], list[str]], ranks: int = 1) -> Stage:
    folder = f"out/{kind}"
    begun = f"{folder}/begun.json"  # swept by the last act, or by the next run
    return Stage(name, command, ON_MODEL, ranks, views=MEASURED, folders=(folder,), passing=(begun,))


def _study(whole: Path) -> list[str]:
    texts = [*_texts(whole, "prompts", 2), "prompts.held_out.key=content", "prompts.held_out.share=0.5"]
    parts = ["parts=[recurrence,merging]", "max_new_tokens=8", "draft=self:1"]  # those without a clock
    return ["infer.study", f"model={whole}/export/out", *texts, *parts]


def _regenerate(whole: Path) -> list[str]:
    sizes = [
        "documents=12",
        "batch=2",
        "prefix_min=4",
        "prefix_max=12",
        "decode.max_new_tokens=16",
        "threads=1",
    ]
    folders = [f"model={whole}/export/out", f"data.path={whole}/data_prep-1/out"]
    return ["infer.regenerate", *folders, *sizes, "dtype=float32", "decode.temperature=1"]


def _both(whole: Path, folder: Path) -> None:
    """The results of speed and quality, as a report finds them."""
    for kind in ("speed", "quality"):
        shutil.copytree(whole / kind / "out" / kind, folder / "out" / kind)


MEASURED = {
    "out/*.png": present,
    "out/*.csv": present,
    "out/report.json": present,
    "out/index.html": present,
    "*/manifest.json": MANIFEST,
    "*/speed.json": speed,
    "*/speed/units/*": turn,
    "*/speed/header.json": less("date", "commit", "costs", "limits"),
    "*/quality.json": less("date", "commit"),
    "*/quality/header.json": less("date", "commit"),
    "*/quality/units/*": less(),
}
ON_MODEL = ("export", "data_prep-1")
UNMEASURED = ["decode=sdsat", "decode.probes=all", "decode.k=2", "dtype=float32"]  # the page shows its drafts
CHECK = ["infer.gpu_check", "device=cpu", "shapes=[tiny]", "k=[3]", "context=64", "rounds=3", "prompts=2"]


def _shown() -> Iterator[Stage]:
    """Those that leave files, not folders."""
    yield Stage(
        "graph",
        lambda whole: ["infer.graph", f"model={whole}/export/out", "draft=self:1", "prompt=import torch"],
        ("export",),
        out="graph.png",
    )
    yield Stage(
        "page",
        lambda whole: ["infer", f"model={whole}/export/out", "prompt=import torch", *UNMEASURED],
        ("export",),
        out="page.html",
        setting="html",
        views={"page.html": page},
    )
    yield Stage(
        "gpu_check",
        lambda whole: [*CHECK, "compile=false"],
        out="check.json",
        views={"check.json": parity},
        growing=("check.json",),
    )
    yield Stage(
        "report",
        lambda whole: ["infer.report", QUIET],
        ("speed", "quality"),
        views={"out/index.html": page, "out/report.json": less("date", "commit")},
        folders=("out/speed", "out/quality"),
        begin=_both,
    )


def _stages() -> Iterator[Stage]:
    yield from (_data(1), _data(2))
    yield _train("train", QUIET)
    yield _train("train-2", QUIET, "deepspeed=zero2", ranks=2)
    yield _train("train-lora", QUIET, "lora.rank=4")
    yield _train("train-tracked", "tracker.mode=offline")
    yield _export("export", "train", "dtype=float32")
    yield _export("export-shards", "train", "dtype=bfloat16", "shard_size=20KB")
    yield _export("export-lora", "train-lora", "lora=kept")
    for ranks in (1, 2):
        name = "speed" if ranks == 1 else f"speed-{ranks}"
        yield _measured(name, "speed", _speed, ranks)
    yield _measured("quality", "quality", _quality)
    yield Stage(
        "study", _study, ON_MODEL, views={"*/manifest.json": MANIFEST, "*/report.json": less("date", "commit")}
    )
    for ranks in (1, 2):
        yield Stage(
            "regenerate" if ranks == 1 else f"regenerate-{ranks}",
            _regenerate,
            ON_MODEL,
            ranks,
            views={"*/manifest.json": less("created", "commit", "seconds")},
            passing=("out/units/*", "out/begun.json"),  # swept by the last act, or by the next run
        )
    yield from _shown()


STAGES = {stage.name: stage for stage in _stages()}
