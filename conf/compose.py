"""YAML and overrides composed into a stage's dataclass. `DictConfig` never leaves this file.

Hydra composes the chosen files; the values of the command line are then set one by one, each as its type asks:
a prompt or a path is text, whatever brackets it has; a list needs none; settings by name may have any name.

A stage's YAML also holds groups of files, of which one or several are chosen. The comment at the head of a
choice says what it is for, in a sentence on its first line and more below; that of config.yaml has the command,
and below it examples of it.
"""

import difflib
import re
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError
from conf.schema import (
    bare,
    check_paths,
    check_values,
    kind_of,
    kinds,
    named_setting,
    names,
    place,
    types_of,
)

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Choice:
    """One file of a group: `lines` are its comment."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Files of settings, of which one is chosen by name, or several.

    `default` are the names chosen where nothing is said; `otherwise` says what happens where these are none.
    """

    name: str
    several: bool
    default: tuple[str, ...]
    otherwise: str
    choices: tuple[Choice, ...]


def command(entry: str) -> tuple[str, ...]:
    """Return how a stage is called, and examples, as the head of its config.yaml has them."""
    return _head(FOLDER / entry / "config.yaml")


def config_groups(entry: str) -> list[Group]:
    """Return all groups of a stage, with their choices in the order of their names."""
    text = (FOLDER / entry / "config.yaml").read_text(encoding="utf-8")
    defaults: dict[str, Any] = {}
    for item in yaml.safe_load(text)["defaults"]:
        defaults |= item if isinstance(item, dict) else {}
    groups = []
    for folder in sorted(path for path in (FOLDER / entry).iterdir() if path.is_dir()):
        default: Any = defaults.get(folder.name)
        several = isinstance(default, list)
        otherwise = re.search(rf"^ *- {folder.name}: null +# (.+)$", text, re.MULTILINE)
        groups.append(
            Group(
                name=folder.name,
                several=several,
                default=tuple(default) if several else (default,) if default else (),
                otherwise=otherwise[1] if otherwise else "",
                choices=tuple(
                    Choice(path.stem, _head(path))
                    for path in sorted(folder.glob("*.yaml"))
                ),
            )
        )
    return groups


def _head(path: Path) -> tuple[str, ...]:
    """Return the comment that a file begins with, without Hydra's `@package`."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    lines = (
        [line.removeprefix("#").strip() for line in comment[0].splitlines()]
        if comment
        else []
    )
    return tuple(line for line in lines if not line.startswith("@package"))


T = TypeVar("T")
OUT = "out"  # the setting of a text in which ${NAME} is another setting's value
_UNCONVERTED = re.compile(
    r"Value '(?P<value>.*)' "
    r"(?:of type '\w+' could not be converted to (?P<kind>\w+)|is not a valid bool)"
)
_KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    None: "true or false",
}  # by OmegaConf's words


def settings(entry: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Compose `conf/<entry>/config.yaml` with `overrides` into an instance of `schema`.

    Raises UserError for an unknown setting, a value of the wrong type, a missing value or a combination that
    the dataclass refuses.
    """
    config = _compose(entry, schema, overrides)
    chosen = [group.name for group in config_groups(entry)]
    try:
        check_values(OmegaConf.to_container(config), schema)
        result: T = OmegaConf.to_object(config)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, schema, chosen)) from error
    except (ValueError, TypeError) as error:
        start = (
            ""
            if named_setting(str(error), schema, chosen)
            else f"settings of {entry}: "
        )
        raise UserError(f"{start}{error}") from error
    check_paths(result)
    return result


def composed(entry: str, schema: type) -> dict[str, Any]:
    """Return the defaults as plain values: what is required and missing is "???"."""
    return OmegaConf.to_container(_compose(entry, schema, ()), resolve=False)  # type: ignore[return-value]


def as_yaml(entry: str, schema: type, overrides: Sequence[str] = ()) -> str:
    """Return the settings as YAML. Raises UserError as `settings`."""
    return OmegaConf.to_yaml(_compose(entry, schema, overrides), resolve=False)


def _compose(entry: str, schema: type, overrides: Sequence[str]) -> DictConfig:
    OmegaConf.register_new_resolver("sysconfig", sysconfig.get_path, replace=True)
    # The dataclass is the first of the YAML's defaults: it gives every setting its type.
    ConfigStore.instance().store(name="schema", node=schema)
    known = {group.name: group for group in config_groups(entry)}
    overrides = [unsigned(text) for text in overrides]
    choices: list[str] = []
    for text in overrides:
        _check_override(text, overrides, schema, known)
        name, _, value = text.partition("=")
        if group := known.get(name):
            # Hydra cannot read null for a group that has no choice by default.
            if group.several or group.default or value != "null":
                choices.append(f"{name}={_bracketed(value)}" if group.several else text)
        elif name[:1] == "~" and name[1:] in known:
            choices.append(text)
    try:
        with initialize_config_dir(str(FOLDER / entry), version_base=None):
            config = compose("config", overrides=choices)
        for text in overrides:
            if text.removeprefix("~").partition("=")[0] not in known:
                _set(config, text, schema)
    except (
        HydraException,
        OmegaConfBaseException,
        OverflowError,
    ) as error:  # the last: no float is so large
        raise UserError(_explain(error, schema, [*known])) from error
    return config


def unsigned(override: str) -> str:
    """Return an override without Hydra's `+` and `++`: no setting can be added."""
    return override.lstrip("+")


def _check_override(
    override: str, overrides: Sequence[str], schema: type, groups: Mapping[str, Group]
) -> None:
    """Raise UserError for what is no setting, for a choice that its group lacks, and for `~name` of what must
    be there.
    """
    known = [*names(schema), *groups]
    name, equals, value = override.partition("=")
    if override.startswith(("-", "=")) or not (equals or override.startswith("~")):
        name, equals, value = override.lstrip("-").replace("-", "_").partition("=")
        advice = "--help lists the settings"
        if override.startswith("-") and name in known:  # --model X or --model=X
            following = overrides[list(overrides).index(override) + 1 :][:1]
            value = (
                override.partition("=")[2] if equals else "".join(following) or "VALUE"
            )
            advice = f"Write {name}={value}"
        raise UserError(
            f"settings must be given as name=value, got '{override}'. {advice}"
        )
    removed = name.startswith("~")
    name = name.removeprefix("~")
    group = groups.get(name)
    if group is None and place(schema, name) is None:
        raise UserError(_unknown(name, known))
    if removed:
        may_go = (
            group.several or not group.default if group else kind_of(name, schema)[1]
        )
        if not may_go:
            raise UserError(
                f"{name} must have a value, got ~{name}. Write {name}=VALUE"
            )
    elif group:
        # No choice at all is one, where there may be several.
        chosen = re.findall(r"[^\s,\[\]]+", value) or ["none"]
        none = (
            chosen in (["none"], ["null"])
            if group.several
            else value == "null" and not group.default
        )
        choices = [choice.name for choice in group.choices]
        wrong = [choice for choice in chosen if choice not in choices]
        if wrong and not none:
            quantity = "some" if group.several else "one"
            raise UserError(
                f"{name} must be {quantity} of {', '.join(choices)}, got {wrong[0]}"
            )


def _set(config: DictConfig, override: str, schema: type) -> None:
    name, _, value = override.partition("=")
    if name.startswith("~"):
        parent, _, last = name[1:].rpartition(".")
        with open_dict(config):
            del OmegaConf.select(config, parent)[last]
        return
    kind, _ = kind_of(name, schema)
    if is_dataclass(kind) and (field := bare(kind)):
        name = f"{name}.{field}"
        kind = kinds(kind)[field]
    own = kind is Any or (get_origin(kind) is dict and get_args(kind)[1] is Any)
    OmegaConf.update(
        config, name, _parsed(name, value, types_of(kind)), merge=True, force_add=own
    )


def _parsed(name: str, value: str, types: Sequence[Any]) -> Any:
    """Return a value of the command line as OmegaConf takes it for these types."""
    if str in types and (value != "null" or NoneType not in types):
        # `${objective.L}` in a text is no other setting's value, but in `out`.
        return value if name == OUT else re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if any(get_origin(kind) is list for kind in types) and not (
        value == "null" and NoneType in types
    ):
        value = _bracketed(value)
    try:
        override = OverridesParser.create().parse_override(f"{OUT}={value}")
    except HydraException as error:
        raise UserError(
            f"{name} must be a value such as 3, true, [1,2] or a word, got {value}"
        ) from error
    if override.is_sweep_override():  # Hydra's, for a run with each
        raise UserError(f"{name} must be one value, got {value}")
    parsed = override.value()
    # OmegaConf takes every number but 0 for true: `compile=8`.
    if bool in types and isinstance(parsed, int | float) and parsed not in (0, 1):
        raise UserError(f"{name} must be true or false, got {value}")
    return parsed


def _bracketed(value: str) -> str:
    """Return a list of Hydra's grammar, from one or from values with commas between them."""
    return (
        value
        if value.startswith(("[", "$"))
        else f"[{'' if value == 'null' else value}]"
    )


def _explain(error: Exception, schema: type, groups: Collection[str]) -> str:
    """Return Hydra's and OmegaConf's many-line messages as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next(
        (
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("full_key:")
        ),
        "",
    )
    details = (
        "full_key:",
        "object_type=",
        "reference_type=",
        "Config search path",
        "provider=",
    )
    text = " ".join(line for line in lines if not line.startswith(details))
    if text.startswith("Key '"):
        return _unknown(key, [*names(schema), *groups])
    if text.endswith("is not Optional"):
        return f"{key} must have a value, got null"
    if key and (value := _UNCONVERTED.match(text)) and value["kind"] in _KINDS:
        return f"{key} must be {_KINDS[value['kind']]}, got '{value['value']}'"
    if dangling := re.match(r"Interpolation key '(.*)' not found", text):
        return f"{key} must refer to settings as ${{NAME}}, got ${{{dangling[1]}}}, which is none"
    if "missing mandatory value" in text.lower():
        missing = text.rsplit(":", 1)[-1].strip()
        key = (
            key if key.endswith(f".{missing}") else missing
        )  # of a dataclass within another: with its group
        return f"setting '{key}' is required: give it as {key}=VALUE"
    text = text.partition(" See https://hydra.cc")[0]
    return text if not key or key in text else f"setting '{key}': {text}"


def _unknown(key: str, known: Collection[str]) -> str:
    """Say that `key` is no setting, with the nearest of the `known` names."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"unknown setting '{key}': " + (
        f"did you mean '{close[0]}'?" if close else "--help lists the settings"
    )
