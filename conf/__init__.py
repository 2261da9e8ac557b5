"""Settings: Hydra YAML plus command-line overrides in, one typed dataclass out.

Knows how settings are composed and how a user's mistake is told. Knows no stage: the
dataclass that gives names and types comes from the stage itself. `DictConfig` never
leaves this file.
"""

import difflib
import errno
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.errors import LoneError, UserError

T = TypeVar("T")
GRACE = 5.0  # seconds


def settings(entry: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Compose `conf/<entry>/config.yaml` with `overrides` into an instance of `schema`.

    Raises UserError for an unknown setting, a value of the wrong type, a missing value
    or a combination that the dataclass refuses.
    """
    OmegaConf.register_new_resolver("sysconfig", sysconfig.get_path, replace=True)
    OmegaConf.register_new_resolver("required", _required, replace=True)
    try:
        return OmegaConf.to_object(_compose(entry, schema, overrides))  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, schema)) from error
    except (ValueError, TypeError) as error:
        raise UserError(f"settings of {entry}: {error}") from error


def _required(name: str) -> None:
    """`${required:NAME}` in the YAML: ??? for a setting that has a default, over which ??? is ignored."""
    raise MissingMandatoryValue(f"Missing mandatory value: {name}")


def run(entry: str, schema: type[T], main: Callable[[T], None]) -> None:
    """Call `main` with the settings of the command line; a UserError ends in one line and code 2."""
    overrides = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in overrides):
        print(_help(entry, schema))
        return
    config: Any = None
    try:
        config = settings(entry, schema, overrides)
        main(config)
    except UserError as error:
        _fail(str(error), alone=isinstance(error, LoneError))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        # An error of writing names no file: then it is the result that found no place.
        place = error.filename or f"out={getattr(config, 'out', '')}"
        _fail(f"{place}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str, *, alone: bool = False) -> None:
    # Every rank of a torchrun job meets the same mistake: one of them says it.
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)  # torchrun ends all with the first that ends: the one that speaks may be slower
    sys.exit(2)


def _compose(entry: str, schema: type, overrides: Sequence[str] = ()) -> DictConfig:
    # The dataclass is the first of the YAML's defaults: it gives every setting its type.
    ConfigStore.instance().store(name="schema", node=schema)
    folder = Path(__file__).parent / entry
    several = _several(folder)
    _check_choices(overrides, several)
    # So do the settings by name, of those names that no YAML has.
    members = _members(overrides, schema)
    ConfigStore.instance().store(group="members", name="members", node=members, package="_global_")
    taken = [_quoted(text, schema, several) for text in overrides]
    with initialize_config_dir(str(folder), version_base=None):
        return compose("config", overrides=[*taken, "+members=members"] if members else taken)


def _groups(folder: Path) -> dict[str, list[str]]:
    """The choices of every group."""
    groups = (path for path in sorted(folder.iterdir()) if path.is_dir())
    return {path.name: sorted(choice.stem for choice in path.glob("*.yaml")) for path in groups}


def _several(folder: Path) -> dict[str, list[str]]:
    """The groups of which several may be chosen, those whose default is a list, and their choices."""
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    chosen = [entry for entry in config["defaults"] if isinstance(entry, dict)]
    names = {name for entry in chosen for name, choice in entry.items() if isinstance(choice, list)}
    return {name: choices for name, choices in _groups(folder).items() if name in names}


def _check_choices(overrides: Sequence[str], several: Mapping[str, Collection[str]]) -> None:
    for override in overrides:
        group, _, value = override.partition("=")
        for choice in re.findall(r"[^\s,\[\]]+", value if group in several and value != "null" else ""):
            if choice not in several[group]:
                raise UserError(f"{group}: wanted some of {', '.join(several[group])}, found {choice}")


def _members(overrides: Sequence[str], schema: type) -> dict[str, dict[str, Any]]:
    """The names given to settings by name, a dict of dataclasses: `prompts.mine.path=FILE` gives `mine`."""
    found: dict[str, dict[str, Any]] = {}
    for override in overrides:
        group, *names = override.partition("=")[0].split(".")
        if len(names) > 1 and _by_name(get_type_hints(schema).get(group)):
            found.setdefault(group, {})[names[0]] = {}
    return found


def _by_name(kind: Any) -> Any:
    """The dataclass of settings by name; None for others."""
    return get_args(kind)[1] if get_origin(kind) is dict and is_dataclass(get_args(kind)[1]) else None


def _quoted(override: str, schema: type, several: Collection[str] = ()) -> str:
    """The override as Hydra's grammar takes it: the value of a text setting quoted, since a prompt or
    a path with brackets, commas or spaces would be read as something else; a bare value for nested
    settings given to that field of theirs which is marked for it; a list, or several choices of a group,
    in brackets; and what belongs to a library's own settings, a dict of Any, given whether the YAML has it
    already or not.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if key in several:
        return f"{key}={_bracketed(value)}"
    kind: Any = schema
    for name in key.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            if kind is Any:
                return f"++{override}"
        elif is_dataclass(kind):
            kind = get_type_hints(kind).get(name)
    if is_dataclass(kind) and (bare := _bare(kind)):
        key, kind = f"{key}.{bare}", get_type_hints(kind)[bare]
    types = [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]
    if str in types and (kind is str or value != "null"):
        return f"{key}={_as_text(value)}"
    if any(get_origin(one) is list for one in types) and not (value == "null" and NoneType in types):
        value = _bracketed(value)
    return f"{key}={value}"


def _bracketed(value: str) -> str:
    """A list of Hydra's grammar, from one or from values with commas between them."""
    return value if value.startswith(("[", "$")) else f"[{'' if value == 'null' else value}]"


def _as_text(value: str) -> str:
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r"(\\*)'", r"\1\1\'", escaped)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def _bare(schema: Any) -> str | None:
    """The field that a bare value is for, `draft=DIR` being `draft.model=DIR`: that of metadata `bare`."""
    return next((field.name for field in fields(schema) if field.metadata.get("bare")), None)


def _explain(error: Exception, schema: type) -> str:
    """Hydra's and OmegaConf's many-line messages as one sentence."""
    if "Error merging override" in str(error) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("object_type=", "reference_type="))]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    unknown = "Could not override" in lines[0]
    if unknown or lines[0].startswith("Key '"):
        key = lines[0].split("'")[1] if unknown else key
        known = _names(schema, key)
        close = difflib.get_close_matches(key, known, n=1)
        return f"unknown setting '{key}': " + (
            f"did you mean '{close[0]}'?" if close else f"the settings are {', '.join(known)}"
        )
    kept = [line for line in lines if not line.startswith(("full_key:", "Config search path", "provider="))]
    text = " ".join(kept)
    if key and key not in text:
        text = f"setting '{key}': {text}"
    if "missing mandatory value" in text.lower():
        key = text.rsplit(":", 1)[-1].strip()
        return f"setting '{key}' is required: give it as {key}=VALUE"
    return text


def _names(schema: Any, key: str, prefix: str = "") -> Sequence[str]:
    """All settings; of those by name, the members are called as in `key`."""
    names: list[str] = []
    for field in fields(schema):
        kind = get_type_hints(schema)[field.name]
        place = f"{prefix}{field.name}."
        if member := _by_name(kind):
            name = key.removeprefix(place).split(".")[0] if key.startswith(place) else "NAME"
            names += _names(member, key, f"{place}{name}.")
        elif is_dataclass(kind):
            names += _names(kind, key, place)
        else:
            names.append(prefix.removesuffix(".") if field.metadata.get("bare") else prefix + field.name)
    return names


def _help(entry: str, schema: type) -> str:
    folder = Path(__file__).parent / entry
    defaults = OmegaConf.to_yaml(_compose(entry, schema), resolve=False)
    listed = "\n".join(
        f"  {name}={(',' if name in _several(folder) else '|').join(choices)}"
        for name, choices in _groups(folder).items()
    )
    doc = (schema.__doc__ or "").strip()
    return f"{doc}\n\nSettings are given as name=value.\n\nGroups:\n{listed}\n\nDefaults:\n{defaults}"


__all__ = ["LoneError", "UserError", "run", "settings"]
