"""Every command, as its user calls it, with wrong settings and places: one sentence and code 2, or done.

Data, models and devices are such that a right command ends in a moment: a plan, a report of nothing, a model
that is not there.
"""

import random
from pathlib import Path

from conf.help import written
from conf.schema import NAME, fields_of
from docs.reference import ENTRIES
from tests.drills.fuzz import mutate, settings, tools
from tests.drills.fuzz.command import call

COUNT = 600
MODULES = {
    "inspect": "data_prep.inspect",
    "train": "train",
    "export": "train.export",
    "infer": "infer",
    "graph": "infer.graph",
    "speed": "infer.speed",
    "quality": "infer.quality",
    "report": "infer.report",
    "study": "infer.study",
}
SHAPE = "model.shape={model_type:llama,hidden_size:64,intermediate_size:128,num_hidden_layers:2,vocab_size:512}"
SMALL = {
    "train": ["plan=true", "model.random_init=true", "model.path=null", SHAPE, "plan_ranks=1", "plan_device=8"],
    "speed": ["prompts=", "prompts.mine.path=gone.jsonl"],
}


def run(rng: random.Random, folder: Path) -> str:
    """One command with one to three settings of any kind."""
    entry = rng.choice([*MODULES, "train", "train"])
    places = {"m": folder / "model", "o": folder / "out", "c": folder / "checkpoint", "d": tools.data_folder()}
    if entry == "inspect":
        places["o"] = tools.data_folder()
    given = [_placed(text, places) for text in settings.GIVEN[entry]] + SMALL.get(entry, [])
    known = {name: kind for name, _, _, kind in fields_of(ENTRIES[entry]) if name not in ("device", "plan")}
    asked = []
    for name in rng.sample(list(known), rng.choice((0, 1, 1, 2, 3))):
        text = settings.argument(known[name], rng)
        if "inspect" not in (entry, name) or name != "out":
            asked.append(f"{name.replace(NAME, 'mine')}={text}")
    if entry == "train" and rng.random() < 0.4:
        field = rng.choice(
            ("hidden_size", "num_attention_heads", "model_type", "rope_theta", "vocab_size", "x")
        )
        asked.append(f"model.shape.{field}={rng.choice((written(rng.randrange(200)), mutate.text(rng)))}")
    if rng.random() < 0.3:
        _occupy(rng, rng.choice([places["m"], places["o"], places["c"]]), folder)
    return call(MODULES[entry], [*given, *asked], rng).outcome


def _placed(text: str, places: dict[str, Path]) -> str:
    name, _, value = text.partition("=")
    return f"{name}={places.get(value, value)}"


def _occupy(rng: random.Random, place: Path, folder: Path) -> None:
    """Something is where a result is to be, or a model ought to be."""
    if place.is_relative_to(folder):
        if rng.random() < 0.3:
            place.write_bytes(rng.randbytes(9))
        else:
            place.mkdir()
            (place / rng.choice(("config.json", "manifest.json", "x"))).write_bytes(
                mutate.text(rng).encode("utf-8", "ignore")
            )
