"""Write settings.md: every setting of every command, as Markdown tables that GitHub renders.

    python -m docs.settings

Defaults come from the dataclasses and the YAML files that are chosen by default, meanings from the `#:`
comments above the fields, and limits from conf.settings.schema. `tests/test_docs.py` checks that the page
is up to date.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.runs.files import write_bytes
from conf.settings.compose import FOLDER, register
from conf.settings.schema import MISSING as REQUIRED
from conf.settings.schema import any_of, field_types, range_in_words, union_members

PAGE = Path(__file__).with_suffix(".md")
BEGIN = (
    "<!-- Written by python -m docs.settings: edit the dataclasses, not the tables. -->"
)
COMMENT = re.compile(r"((?:^ *#:.*\n)+) *(\w+):", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A command: its title, its folder in conf/, and the module and name of its dataclass."""

    title: str
    folder: str
    module: str
    schema: str

    def load(self) -> type:
        """Return the dataclass of the settings."""
        schema: type = getattr(importlib.import_module(self.module), self.schema)
        return schema


ENTRIES = (
    Entry("python -m data_prep", "data_prep", "data_prep.config", "DataPrepConfig"),
    Entry(
        "python -m data_prep.inspect", "inspect", "data_prep.inspect", "InspectConfig"
    ),
    Entry("torchrun -m train", "train", "train.config", "TrainConfig"),
    Entry("python -m train.inspect", "train", "train.inspect", "TrainInspectConfig"),
    Entry("python -m train.export", "export", "train.export", "ExportConfig"),
    Entry("python -m train.convert", "convert", "train.convert", "ConvertConfig"),
    Entry("python -m infer", "infer", "infer.config", "InferConfig"),
    Entry("python -m infer.bench", "bench", "infer.bench.config", "BenchConfig"),
    Entry(
        "python -m infer.bench.compare",
        "compare",
        "infer.bench.compare",
        "CompareConfig",
    ),
    Entry(
        "python -m infer.regenerate",
        "regenerate",
        "infer.regenerate",
        "RegenerateConfig",
    ),
)


def main() -> None:
    """Rewrite the tables below the page's introduction."""
    write_bytes(PAGE, page(PAGE.read_text(encoding="utf-8")).encode())


def page(text: str) -> str:
    """Return the page with its introduction unchanged and new tables."""
    introduction = text.partition(BEGIN)[0]
    sections = (section(entry) for entry in ENTRIES)
    return "\n".join([introduction + BEGIN, "", *sections])


def section(entry: Entry) -> str:
    """Return a command's tables: its choices, then its settings, one table per group.

    A command that extends another one has only its own settings.
    """
    lines = [f"## `{entry.title}`", ""]
    extended = [
        other
        for other in ENTRIES
        if other != entry and issubclass(entry.load(), other.load())
    ]
    chosen = chosen_defaults(entry)
    known = set[str]()
    for other in extended:
        lines += [
            f"It has the choices and settings of `{other.title}`, and its own:",
            "",
        ]
        known |= {
            row
            for group, schema in groups(other.load())
            for row in rows(schema, group, chosen)
        }
    choices = [] if extended else list(list_choices(FOLDER / entry.folder))
    if choices:
        lines += ["| choice | meaning |", "|---|---|"]
        lines += [f"| `{choice}` | {cell(meaning)} |" for choice, meaning in choices]
        lines.append("")
    for group, schema in groups(entry.load()):
        own = [row for row in rows(schema, group, chosen) if row not in known]
        if extended and not own:
            continue
        if group:
            lines += [f"### `{group}` of `{entry.title}`", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|", *own, ""]
    return "\n".join(lines)


def list_choices(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield `group=choice` and the comment at the top of its YAML file."""
    for path in sorted(folder.rglob("*.yaml")):
        group = path.parent.relative_to(folder).as_posix()
        if group == ".":
            continue
        comment = [
            line.lstrip("# ")
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.startswith("# ") and "@package" not in line
        ]
        yield f"{group}={path.stem}", " ".join(comment)


def groups(schema: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dataclass and its nested dataclasses, each with the prefix of its settings."""
    yield prefix, schema
    for name, kind in field_types(schema).items():
        for nested in union_members(kind):
            if is_dataclass(nested):
                yield from groups(nested, f"{prefix}.{name}".lstrip("."))  # type: ignore[arg-type]


def chosen_defaults(entry: Entry) -> dict[str, Any]:
    """Return the settings that the YAML of a command without arguments sets, by their full names."""
    register(entry.load(), command=False)
    with initialize_config_dir(str(FOLDER / entry.folder), version_base=None):
        composed = compose("config")
    bare = OmegaConf.structured(entry.load())
    names = [
        f"{group}.{item.name}".lstrip(".")
        for group, schema in groups(entry.load())
        for item in fields(schema)
        if not any(map(is_dataclass, union_members(field_types(schema)[item.name])))
    ]
    values = {name: OmegaConf.select(composed, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if value != OmegaConf.select(bare, name)
    }


def rows(schema: type, group: str, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table row for each setting that is not a group; `chosen` replaces defaults of the dataclass."""
    meanings = read_meanings(schema)
    for item in fields(schema):
        kind = field_types(schema)[item.name]
        if any(map(is_dataclass, union_members(kind))):
            continue
        name = f"{group}.{item.name}".lstrip(".")
        meaning = meanings[item.name] + limits(item, kind, meanings[item.name])
        value = f"`{as_typed(chosen[name])}`" if name in chosen else default(item)
        yield f"| `{name}` | {value} | {cell(meaning)} |"


def read_meanings(schema: type) -> dict[str, str]:
    """Return the `#:` comment of each field of a dataclass and its bases, by name."""
    result = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            for comment, name in COMMENT.findall(inspect.getsource(base)):
                result[name] = " ".join(comment.replace("#:", " ").split())
    return result


def default(item: Field[Any]) -> str:
    """Return a setting's default as typed on the command line, or "required"."""
    value = item.default
    if item.default_factory is not MISSING:
        value = item.default_factory()
    if value in (MISSING, REQUIRED):
        return "required"
    return f"`{as_typed(value)}`"


def as_typed(value: object) -> str:
    """Return a value in the syntax of the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{name}: {as_typed(member)}" for name, member in value.items())
        return f"{{{', '.join(pairs)}}}"
    return str(value) if value != "" else '""'


def limits(item: Field[Any], kind: Any, meaning: str) -> str:
    """Return a setting's limits in parentheses, to append to its meaning.

    Return "" for a setting without limits, or with a meaning that names all choices.
    """
    choices = [str(choice) for choice in item.metadata.get("choices", ())]
    if any(choice not in meaning for choice in choices):
        return f" ({any_of(choices)})"
    numeric = {int, float} & {*union_members(kind)}
    if numeric and item.metadata.keys() & {"least", "most", "above", "below"}:
        return f" ({range_in_words(item.metadata)})"
    return ""


def cell(text: str) -> str:
    """Return text as a Markdown table cell: escape pipes, and * and < outside code."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    main()
