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
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

T = TypeVar("T")


class UserError(Exception):
    """One sentence for the user: the setting or file, what was wanted, what was found."""


class LoneError(UserError):
    """The same, met by one rank of many: it is told by that rank, whichever it is."""


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
    sys.exit(2)


def _compose(entry: str, schema: type, overrides: Sequence[str] = ()) -> DictConfig:
    # The dataclass is the first of the YAML's defaults: it gives every setting its type.
    ConfigStore.instance().store(name="schema", node=schema)
    with initialize_config_dir(str(Path(__file__).parent / entry), version_base=None):
        return compose("config", overrides=[_quoted(text, schema) for text in overrides])


def _quoted(override: str, schema: type) -> str:
    """The override as Hydra's grammar takes it: the value of a text setting quoted, since a prompt or
    a path with brackets, commas or spaces would be read as something else; a bare value for nested
    settings given to that field of theirs which is marked for it; and what belongs to a library's own
    settings, a dict of Any, given whether the YAML has it already or not.
    """
    key, equals, value = override.partition("=")
    kind: Any = schema
    for name in key.split("."):
        if get_origin(kind) is dict and get_args(kind)[1] is Any:
            return f"++{override}" if equals else override
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif is_dataclass(kind):
            kind = get_type_hints(kind).get(name)
    if is_dataclass(kind) and (bare := _bare(kind)):
        key, kind = f"{key}.{bare}", get_type_hints(kind)[bare]
    is_text = kind is str or (str in get_args(kind) and get_origin(kind) is not list and value != "null")
    if not equals:
        return override
    if not is_text:
        return f"{key}={value}"
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r"(\\*)'", r"\1\1\'", escaped)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"{key}='{escaped}'"


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
        known = _names(schema)
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


def _names(schema: Any, prefix: str = "") -> Sequence[str]:
    names: list[str] = []
    for field in fields(schema):
        nested = field.type if isinstance(field.type, type) and is_dataclass(field.type) else None
        name = prefix.removesuffix(".") if field.metadata.get("bare") else prefix + field.name
        names += _names(nested, f"{prefix}{field.name}.") if nested else [name]
    return names


def _help(entry: str, schema: type) -> str:
    directory = Path(__file__).parent / entry
    groups = {
        path.name: sorted(choice.stem for choice in path.glob("*.yaml"))
        for path in sorted(directory.iterdir())
        if path.is_dir()
    }
    defaults = OmegaConf.to_yaml(_compose(entry, schema), resolve=False)
    listed = "\n".join(f"  {name}={'|'.join(choices)}" for name, choices in groups.items())
    doc = (schema.__doc__ or "").strip()
    return f"{doc}\n\nSettings are given as name=value.\n\nGroups:\n{listed}\n\nDefaults:\n{defaults}"


__all__ = ["LoneError", "UserError", "run", "settings"]
