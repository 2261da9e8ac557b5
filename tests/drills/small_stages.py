"""Every stage that writes, in its smallest form: its command, and what of its result is the same every time.

The inputs are those of a finished demo, which is only read. Knows nothing of what is done to the places.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPT = "prompt=def mean(values):\n"
SMALL_SPEED = ["prompts.held_out.count=1", "prompts.humaneval.count=1", "decoders=[sdsat]", "k=[3]", "peers=[]"]
SMALL_SPEED += ["temperatures=[0]", "rounds=1", "max_new_tokens=8"]
SMALL_QUALITY = ["benchmarks.humaneval.count=1", "benchmarks.held_out.count=1", "max_new_tokens=8"]
SMALL_STUDY = ["parts=[recurrence]", "prompts.held_out.count=1", "prompts.humaneval.count=1", "rounds=1"]
SMALL_STUDY += ["max_new_tokens=8", "threads=1"]
SMALL_TRAINING = ["experiment=demo", "steps=6", "save_every=2", "keep_last=2", "validate_every=3"]
SMALL_TRAINING += ["validate_sequences=4", "optimizer.warmup_steps=1"]
CHECK = ["device=cpu", "shapes=[tiny]", "compile=false", "dtype=float32", "k=[3]", "context=16", "rounds=3"]


@dataclass(frozen=True)
class Stage:
    """A module, its settings for a demo and a folder to write, its result, and what of that never differs."""

    module: str
    settings: Callable[[Path, Path], list[str]]
    result: str  # below the folder; there when the stage has ended well
    same: tuple[str, ...] = ()
    given: tuple[str, ...] = ()  # of the demo, copied into the folder first

    def command(self, demo: Path, place: Path) -> list[str]:
        """As the user types it."""
        return [sys.executable, "-m", self.module, *self.settings(demo, place)]

    def found(self, place: Path) -> dict[str, str]:
        """By file, a hash of what must be the same every time; of a training's log, the losses."""
        top = place / self.result
        top = top if top.is_dir() else top.parent
        files = sorted({path for pattern in self.same for path in top.glob(pattern)})
        return {str(path.relative_to(place)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    content = path.read_bytes()
    if path.name == "log.jsonl":
        steps = [json.loads(line) for line in content.splitlines()]
        content = json.dumps([(step["step"], step["loss"]) for step in steps]).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _data_prep(demo: Path, place: Path) -> list[str]:
    library = f"data.path={sysconfig.get_path('stdlib')}"
    files = "data.include=[json/*.py,email/*.py,logging/*.py]"
    sizes = ["data.split_chars=150", "vocab.train_size=400", "seq_len=128", "held_out=0.2"]
    return ["vocab=demo", "workers=2", library, files, *sizes, f"out={place}/data"]


def _train(demo: Path, place: Path) -> list[str]:
    inputs = [f"data.path={demo}/data", f"model.path={demo}/base/model_directory"]
    return [*SMALL_TRAINING, *inputs, f"out={place}/tuned"]


def _export(demo: Path, place: Path) -> list[str]:
    inputs = [f"checkpoint={demo}/tuned", f"data.path={demo}/data"]
    return [*inputs, "verify_sequences=8", f"out={place}/model"]


def _speed(demo: Path, place: Path) -> list[str]:
    inputs = [f"model={demo}/model", f"draft={demo}/draft"]
    prompts = f"prompts.held_out.path={demo}/data/held_out.jsonl"
    return [*inputs, "experiment=demo", prompts, *SMALL_SPEED, f"out={place}/report"]


def _quality(demo: Path, place: Path) -> list[str]:
    inputs = [f"model={demo}/model", "experiment=demo", f"benchmarks.held_out.path={demo}/data/held_out.jsonl"]
    return [*inputs, *SMALL_QUALITY, f"out={place}/report"]


def _study(demo: Path, place: Path) -> list[str]:
    inputs = [f"model={demo}/model", f"draft={demo}/draft", "experiment=demo"]
    prompts = f"prompts.held_out.path={demo}/data/held_out.jsonl"
    return [*inputs, prompts, *SMALL_STUDY, f"out={place}/study"]


def _decode(demo: Path, place: Path) -> list[str]:
    return [
        f"model={demo}/model",
        PROMPT,
        "decode=sdsat",
        "decode.max_new_tokens=16",
        f"html={place}/text.html",
    ]


def _graph(demo: Path, place: Path) -> list[str]:
    inputs = [f"model={demo}/model", f"draft={demo}/draft", PROMPT]
    return [*inputs, "decode.max_new_tokens=16", f"out={place}/graph.svg"]


MEASURED = ("report/speed", "report/quality")
STAGES = {
    "data_prep": Stage("data_prep", _data_prep, "data", ("*.npy", "*.jsonl", "tokenizer/*")),
    "train": Stage("train", _train, "tuned", ("log.jsonl", "model/*")),
    "export": Stage(
        "train.export",
        _export,
        "model",
        ("*.safetensors", "config.json", "adaptive.json", "tokenizer.json", "custom_generate/*"),
    ),
    "infer": Stage("infer", _decode, "text.html"),
    "graph": Stage("infer.graph", _graph, "graph.svg"),
    "speed": Stage("infer.speed", _speed, "report/speed"),
    "quality": Stage("infer.quality", _quality, "report/quality"),
    "report": Stage("infer.report", lambda demo, place: [f"out={place}/report"], "report", given=MEASURED),
    "study": Stage("infer.study", _study, "study"),
    "gpu_check": Stage(
        "infer.gpu_check", lambda demo, place: [*CHECK, f"out={place}/check.json"], "check.json"
    ),
}
