"""Settings of every command: a value arrives as it was written, or is refused in one sentence.

No other setting changes, no number arrives that JSON or 64 bits cannot hold, and an unknown name is never
accepted. Now and then the whole command runs, on data, models and devices with which it ends in a moment.
"""

import ast
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from conf import UserError, settings
from conf.compose import OUT, config_groups
from conf.help import written
from conf.schema import NAME, bare, fields_of, names, place
from docs.reference import ENTRIES
from tests.drills.fuzz import mutate
from tests.drills.fuzz.setup import call, demo

COUNT = 3600
REQUIRED = {
    "data_prep": ["out=o", "data.path=d", "tokenizer=t"],
    "inspect": ["out=o"],
    "train": ["out=o", "data.path=d", "model.path=m"],
    "export": ["checkpoint=c", "out=o"],
    "infer": ["model=m", "prompt=p"],
    "graph": ["model=m", "prompt=p"],
    "playground": ["model=m"],
    "speed": ["model=m", "out=o"],
    "quality": ["model=m", "out=o"],
    "regenerate": ["model=m", "data.path=d", "out=o"],
    "report": ["out=o"],
    "study": ["model=m", "out=o", "draft=d"],
    "gpu_check": ["out=o"],
    "train_check": ["out=o"],
}
MODULES = {"inspect": "data_prep.inspect", "train": "train", "export": "train.export", "infer": "infer"}
MODULES |= {name: f"infer.{name}" for name in ("graph", "speed", "quality", "report", "study")}
SHAPE = "model.shape={model_type:llama,hidden_size:64,intermediate_size:128,num_hidden_layers:2,vocab_size:512}"
SMALL = {
    "train": ["plan=true", "model.random_init=true", "model.path=null", SHAPE, "plan_ranks=1", "plan_device=8"],
    "speed": ["prompts=", "prompts.mine.path=gone.jsonl"],
}
TRUE, FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
WORDS = ["true", "false", "null", "on", "5", "", "[]", "{}", "[1,2]", "[a,b]", "{a:1}", "a,b", "[[a]]", "'5'"]
WORDS += ["[{a:1}]", "float32", "plain", "gsd", "self:2", "a b/(c).jsonl", "1e-3", " 7 ", "0x1f", "1_0"]
STRANGE = ("", ".", "+", "~", "@x", "/x", ":", " ", "\0", "\n", "[0]", "${x}", "?", "ü", "=")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def run(rng: random.Random, folder: Path) -> str:
    if rng.random() < 0.15:
        return command(rng, folder)
    entry, kind = rng.choice(list(ENTRIES)), rng.random()
    try:
        (_defaults if kind < 0.1 else _unknown if kind < 0.3 else _values)(entry, rng)
    except UserError as refusal:
        assert str(refusal).strip() and str(refusal).isprintable(), f"no single line: {str(refusal)!r}"
        return "refused"
    return "fine"


def _values(entry: str, rng: random.Random) -> None:
    known = {name: (owner, field, kind) for name, owner, field, kind in fields_of(ENTRIES[entry])}
    chosen = rng.sample(list(known), rng.choice((1, 1, 1, 2, 3)))
    given = {name: argument(known[name][2], rng) for name in chosen}
    arguments = [f"{name.replace(NAME, 'mine')}={text}" for name, text in given.items()]
    result = settings(entry, ENTRIES[entry], [*REQUIRED[entry], *arguments])
    _check_numbers(result)
    before, after = (dict(_flat(asdict(config))) for config in (_default(entry), result))
    for name, text in given.items():
        owner, field, kind = known[name]
        path = f"{name}.{field}" if bare(owner) == field else name.replace(NAME, "mine")
        value = _at(result, path)
        assert arrived(kind, text, value, resolved=name == OUT), f"{entry} {name}={text!r} arrived as {value!r}"
        # A named set, such as prompts.mine, comes with all of its settings.
        touched = path.partition(".mine.")[0] + ".mine." if NAME in name else path
        before, after = (
            {path: value for path, value in flat.items() if not path.startswith(touched)}
            for flat in (before, after)
        )
    assert before == after, f"{entry} {arguments} changed {set(before.items()) ^ set(after.items())}"


def _defaults(entry: str, rng: random.Random) -> None:
    result, again = _default(entry), []
    known = [item for item in fields_of(ENTRIES[entry]) if NAME not in item[0]]
    for name, owner, field, _ in rng.sample(known, rng.randrange(1, len(known))):
        value = _at(result, f"{name}.{field}" if bare(owner) == field else name)
        if not isinstance(value, Mapping):
            # `written` quotes an empty text for a shell, which is not here.
            again.append(f"{rng.choice(('', '', '+', '++'))}{name}={written(value) if value != '' else ''}")
    assert settings(entry, ENTRIES[entry], [*REQUIRED[entry], *again]) == result, again


def _unknown(entry: str, rng: random.Random) -> None:
    chosen = [group.name for group in config_groups(entry)]
    name = rng.choice([*names(ENTRIES[entry]), *chosen]).replace(NAME, "mine")
    at, strange = rng.randrange(len(name)), rng.choice(STRANGE)
    wrong = [name[:at] + strange + name[at:], name + strange, strange + name, name[:at] + name[at + 1 :]]
    value = rng.choice(("", "=", "=3", "=x", "=[a]", "={a:1}", f"={mutate.text(rng)}"))
    text = rng.choice((*wrong, mutate.text(rng))) + value
    result = settings(entry, ENTRIES[entry], [*REQUIRED[entry], text])
    key = text.partition("=")[0].lstrip("+").removeprefix("~")
    assert place(ENTRIES[entry], key) or key in chosen, f"{entry} accepted {text!r}"
    _check_numbers(result)


def argument(kind: Any, rng: random.Random) -> str:
    """Return what a user, or nobody, would write for a setting of this type; an argument has no NUL."""
    kinds: list[Callable[[], str]] = [
        lambda: mutate.text(rng),
        lambda: str(mutate.number(rng)),
        lambda: rng.choice(WORDS),
        lambda: ",".join(str(mutate.number(rng)) for _ in range(rng.randrange(4))),
    ]
    right: dict[Any, Callable[[], str]] = {
        int: lambda: str(rng.randrange(1, 300)),
        float: lambda: str(round(rng.random(), 3)),
        bool: lambda: rng.choice(TRUE + FALSE),
    }
    own = [right[item] for item in (kind, *get_args(kind)) if item in right]
    text = rng.choice(own)() if own and rng.random() < 0.5 else rng.choice(kinds)()
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def arrived(kind: Any, text: str, value: Any, *, resolved: bool = False) -> bool:
    """Return whether a value of a setting's dataclass is what was written."""
    kinds = {kind} if get_origin(kind) is list else {kind, *get_args(kind)}
    if value is None:
        return text == "null" and NoneType in kinds
    if "${" in text and (resolved or str not in kinds):  # Hydra's: a setting may be another's value
        return True
    if str in kinds:
        return value in (text, ALIASES.get(text))
    if bool in kinds:
        return text.strip().lower() in (TRUE if value else FALSE)
    if int in kinds or float in kinds:
        number = text.strip("' ")
        return type(value) in kinds and value == (int(number) if type(value) is int else float(number))
    listed = next((get_args(item)[0] for item in kinds if get_origin(item) is list), None)
    return listed not in (str, int, float) or all(type(item) is listed for item in value)


@cache
def _default(entry: str) -> Any:
    return settings(entry, ENTRIES[entry], REQUIRED[entry])


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}{key}.")
    else:
        yield prefix, repr(value)


def _check_numbers(config: Any) -> None:
    plain = asdict(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    for path, text in _flat(plain):
        value = ast.literal_eval(text)
        for item in value if isinstance(value, list) else [value]:
            assert not isinstance(item, int) or -(2**63) <= item < 2**63, f"{path} {item} arrived"


def command(rng: random.Random, folder: Path) -> str:
    """Run one command with one to three settings of any kind; a file may be where it reads or writes."""
    entry = rng.choice([*MODULES, "train", "train"])
    places = {"m": folder / "model", "o": folder / "out", "c": folder / "checkpoint", "d": demo() / "data"}
    if entry == "inspect":
        places["o"] = demo() / "data"
    pairs = [text.split("=") for text in REQUIRED[entry]]
    arguments = [f"{name}={places.get(value, value)}" for name, value in pairs] + SMALL.get(entry, [])
    known = {name: kind for name, _, _, kind in fields_of(ENTRIES[entry]) if name not in ("device", "plan")}
    for name in rng.sample(list(known), rng.choice((0, 1, 1, 2, 3))):
        text = argument(known[name], rng)
        if (entry, name) != ("inspect", "out"):
            arguments.append(f"{name.replace(NAME, 'mine')}={text}")
    if entry == "train" and rng.random() < 0.4:
        field = rng.choice(
            ("hidden_size", "num_attention_heads", "model_type", "rope_theta", "vocab_size", "x")
        )
        text = rng.choice((str(rng.randrange(200)), mutate.text(rng).replace("\0", "")))
        arguments.append(f"model.shape.{field}={text}")
    occupied = rng.choice([places["m"], folder / "out", places["c"]])
    if rng.random() < 0.1:
        occupied.write_bytes(rng.randbytes(9))
    elif rng.random() < 0.2:
        occupied.mkdir()
        name = rng.choice(("config.json", "manifest.json", "x"))
        (occupied / name).write_bytes(mutate.text(rng).encode("utf-8", "ignore"))
    return call(MODULES[entry], arguments, rng).outcome
