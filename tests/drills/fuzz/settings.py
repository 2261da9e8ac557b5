"""Settings of every command, composed: a value arrives as it was written, or is refused in one sentence.

Of what was not asked for nothing changes; no number arrives that JSON or 64 bits cannot hold; and what is no
setting is never taken.
"""

import ast
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from conf import UserError, settings
from conf.compose import OUT, groups
from conf.help import written
from conf.schema import NAME, bare, fields_of, names, place
from docs.reference import ENTRIES
from tests.drills.fuzz import mutate

COUNT = 3000

# What is required, so that the rest is accepted.
GIVEN = {
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
TRUE, FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
WORDS = ("true", "false", "null", "on", "5", "", "[]", "{}", "[1,2]", "[a,b]", "{a:1}", "a,b", "[[a]]")
WORDS += ("[{a:1}]", "float32", "plain", "gsd", "self:2", "a b/(c).jsonl", "1e-3", " 7 ", "0x1f", "1_0", "'5'")
STRANGE = ("", ".", "+", "~", "@x", "/x", ":", " ", "\0", "\n", "[0]", "${x}", "?", "ü", "=")


def run(rng: random.Random, folder: Path) -> str:
    """One to three settings of one command."""
    entry = rng.choice(list(ENTRIES))
    try:
        return _one(entry, rng)
    except UserError as refusal:
        sentence = str(refusal)
        assert sentence.strip() and sentence.isprintable(), f"no single line: {sentence!r}"
        return "refused"


def _one(entry: str, rng: random.Random) -> str:
    way = rng.random()
    if way < 0.1:
        return _as_it_was(entry, rng)
    if way < 0.3:
        return _no_setting(entry, rng)
    known = {name: (owner, field, kind) for name, owner, field, kind in fields_of(ENTRIES[entry])}
    asked = {
        name: argument(known[name][2], rng) for name in rng.sample(list(known), rng.choice((1, 1, 1, 2, 3)))
    }
    told = [f"{name.replace(NAME, 'mine')}={text}" for name, text in asked.items()]
    found = settings(entry, ENTRIES[entry], [*GIVEN[entry], *told])
    _check_numbers(found)
    before, after = (dict(flat(asdict(one))) for one in (default(entry), found))
    for name, text in asked.items():
        owner, field, kind = known[name]
        path = f"{name}.{field}" if bare(owner) == field else name.replace(NAME, "mine")
        value = _at(found, path)
        assert arrived(kind, text, value, resolved=name == OUT), f"{entry} {name}={text!r} arrived as {value!r}"
        # A set by a name of its own comes with all of its settings.
        touched = path.partition(".mine.")[0] + ".mine." if NAME in name else path
        before, after = ({k: v for k, v in one.items() if not k.startswith(touched)} for one in (before, after))
    assert before == after, f"{entry} {told} changed {set(before.items()) ^ set(after.items())}"
    return "fine"


def _as_it_was(entry: str, rng: random.Random) -> str:
    """Settings given as they are anyway change nothing."""
    found, again = default(entry), []
    known = [one for one in fields_of(ENTRIES[entry]) if NAME not in one[0]]
    for name, owner, field, _ in rng.sample(known, rng.randrange(1, len(known))):
        value = _at(found, f"{name}.{field}" if bare(owner) == field else name)
        if not isinstance(value, Mapping):
            # What is written as "" is nothing when a shell has read it.
            again.append(f"{rng.choice(('', '', '+', '++'))}{name}={written(value) if value != '' else ''}")
    assert settings(entry, ENTRIES[entry], [*GIVEN[entry], *again]) == found, again
    return "fine"


def _no_setting(entry: str, rng: random.Random) -> str:
    """A name with something wrong in it."""
    chosen = [group.name for group in groups(entry)]
    name = rng.choice([*names(ENTRIES[entry]), *chosen]).replace(NAME, "mine")
    at = rng.randrange(len(name))
    wrong = rng.choice(
        (
            name[:at] + rng.choice(STRANGE) + name[at:],
            name + rng.choice(STRANGE),
            rng.choice(STRANGE) + name,
            name[:at] + name[at + 1 :],
            mutate.text(rng),
        )
    )
    text = wrong + rng.choice(("", "=", "=3", "=x", "=[a]", "={a:1}", f"={mutate.text(rng)}"))
    found = settings(entry, ENTRIES[entry], [*GIVEN[entry], text])
    key = text.partition("=")[0].lstrip("+").removeprefix("~")
    assert place(ENTRIES[entry], key) or key in chosen, f"{entry} took {text!r}"
    _check_numbers(found)
    return "fine"


def argument(kind: Any, rng: random.Random) -> str:
    """What a user, or nobody, would write for a setting of this type: an argument of a command has no NUL."""
    kinds: list[Callable[[], str]] = [
        lambda: mutate.text(rng),
        lambda: str(mutate.number(rng)),
        lambda: rng.choice(WORDS),
        lambda: ",".join(str(mutate.number(rng)) for _ in range(rng.randrange(4))),
    ]
    plain: dict[Any, Callable[[], str]] = {
        int: lambda: str(rng.randrange(1, 300)),
        float: lambda: str(round(rng.random(), 3)),
        bool: lambda: rng.choice(TRUE + FALSE),
    }
    own = [plain[one] for one in (kind, *get_args(kind)) if one in plain]
    text = rng.choice(own)() if own and rng.random() < 0.5 else rng.choice(kinds)()
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def arrived(kind: Any, text: str, value: Any, *, resolved: bool = False) -> bool:
    """Whether a value of a setting's dataclass is what was written."""
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
        return type(value) in kinds and _number(text) == value
    listed = next((get_args(one)[0] for one in kinds if get_origin(one) is list), None)
    if listed in (str, int, float):
        return all(type(one) is listed for one in value)
    return True


ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _number(text: str) -> float:
    text = text.strip("' ")
    try:
        return int(text)
    except ValueError:
        return float(text)


@cache
def default(entry: str) -> Any:
    """The settings where no more is said than must be."""
    return settings(entry, ENTRIES[entry], GIVEN[entry])


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every single value by its path, as text that tells types apart."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}{key}.")
    else:
        yield prefix, repr(value)


def _check_numbers(config: Any) -> None:
    assert is_dataclass(config)
    plain = asdict(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    for path, told in flat(plain):
        value = ast.literal_eval(told)
        for one in value if isinstance(value, list) else [value]:
            assert not isinstance(one, int) or -(2**63) <= one < 2**63, f"{path} {one} arrived"
