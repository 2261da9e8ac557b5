"""Hydra's and OmegaConf's many-line messages as one sentence. Pure."""

import difflib
import re
from collections.abc import Collection

from conf.schema import NAME, names

# OmegaConf's words for a value of another type, and ours.
_UNCONVERTED = re.compile(
    r"Value '(?P<value>.*)' "
    r"(?:of type '\w+' could not be converted to (?P<kind>\w+)|is not a valid bool)"
)
_KINDS = {"Integer": "a whole number", "Float": "a number", None: "true or false"}


def explain(error: Exception, schema: type, groups: Collection[str]) -> str:
    """Return what was wrong with the settings of `schema`, which may also be chosen by `groups`."""
    if "Error merging override" in str(error) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("object_type=", "reference_type="))]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    overridden = "Could not override" in lines[0]
    if overridden or lines[0].startswith("Key '"):
        return unknown(lines[0].split("'")[1] if overridden else key, [*names(schema), *groups])
    if lines[0].endswith("is not Optional"):
        return f"{key} must be a value, got null"
    lines = [line for line in lines if not line.startswith(("full_key:", "Config search path", "provider="))]
    text = " ".join(lines)
    if key and (value := _UNCONVERTED.match(text)) and value["kind"] in _KINDS:
        return f"{key} must be {_KINDS[value['kind']]}, got '{value['value']}'"
    if dangling := re.match(r"Interpolation key '(.*)' not found", text):
        return f"{key} must refer to settings as ${{NAME}}, got ${{{dangling[1]}}}, which is none"
    if key and key not in text:
        text = f"setting '{key}': {text}"
    if "missing mandatory value" in text.lower():
        missing = text.rsplit(":", 1)[-1].strip()
        key = key if key.endswith(f".{missing}") else missing  # of a dataclass within another: with its group
        return f"setting '{key}' is required: give it as {key}=VALUE"
    return text.partition(" See https://hydra.cc")[0]


def unknown(key: str, known: Collection[str]) -> str:
    """Say that `key` is no setting, with the nearest of the `known` names."""
    close = difflib.get_close_matches(key, [_called_as(name, key) for name in known], n=1)
    return f"unknown setting '{key}': " + (
        f"did you mean '{close[0]}'?" if close else "--help lists the settings"
    )


def _called_as(name: str, key: str) -> str:
    """Return a setting by name with the name that `key` has for it."""
    group, by_name, _ = name.partition(f".{NAME}.")
    given = key.removeprefix(f"{group}.").split(".")[0]
    return name.replace(NAME, given, 1) if by_name and key.startswith(f"{group}.") else name
