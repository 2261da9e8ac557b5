"""Compose a stage's settings: YAML of `conf/<entry>` and overrides -> its dataclass.

The command line is Hydra's, https://hydra.cc/docs/advanced/override_grammar/basic/,
with one exception. A setting that holds text takes as it stands any value that is no
single value of Hydra's grammar, so `prompt="def f(a, b):"` and `out="runs/a (1)"` need
no second pair of quotes. `prompt=null`, `vocab.bos='<x>'` and `out='runs/${seed}'` mean
what Hydra's documentation says. `DictConfig` never leaves this file and cli.py.
"""

import atexit
import difflib
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar, get_origin

from hydra import compose, initialize_config_dir
from hydra.conf import HelpConf, HydraConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError, in_one_line
from conf.paths import expand_home
from conf.schema import any_of, kinds, types_of

T = TypeVar("T")
FOLDER = Path(__file__).parent
HELP = """${hydra.help.header}
Groups of settings: GROUP=CHOICE
$APP_CONFIG_GROUPS
Settings: NAME=VALUE, here with their defaults; ??? is required
$CONFIG
--cfg job prints the settings as they would be; -m runs every combination of values with commas;
--config-dir DIR adds YAML files of your own. docs/settings.md says what each setting means.
"""


def register(schema: type) -> None:
    """Store a stage's dataclass, its YAML's first default, and Hydra's own settings.

    Hydra writes no files and sets up no logging. Its sweeper needs a folder, which is a
    temporary one.
    """
    OmegaConf.register_new_resolver("sysconfig", sysconfig.get_path, replace=True)
    OmegaConf.register_new_resolver(
        "temporary_folder", _temporary_folder, replace=True, use_cache=True
    )
    store = ConfigStore.instance()
    store.store(name="schema", node=schema)
    hydra = HydraConf(
        defaults=[
            {"launcher": "basic"},
            {"sweeper": "basic"},
            {"hydra_help": "default"},
            {"hydra_logging": "none"},
            {"job_logging": "none"},
            {"callbacks": None},
            {"env": "default"},
        ],
        run=RunDir("."),
        sweep=SweepDir("${temporary_folder:}", "."),
        output_subdir=None,
        help=HelpConf(app_name="", header="", footer="", template=HELP),
    )
    store.store(group="hydra", name="config", node=hydra, provider="hydra")


def _temporary_folder() -> str:
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def settings(entry: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Compose `conf/<entry>/config.yaml` with `overrides` into an instance of `schema`.

    Raises UserError for an unknown setting, a value of the wrong type, a missing value or
    a combination that the dataclass refuses.
    """
    register(schema)
    overrides = [as_text(text, schema) for text in with_files(overrides, entry)]
    folder = str(FOLDER / entry)
    with explained(entry, schema), initialize_config_dir(folder, version_base=None):
        config = compose("config", overrides=overrides)
    return to_dataclass(config, entry, schema)


@contextmanager
def explained(entry: str, schema: type) -> Iterator[None]:
    """Raise UserError for what Hydra, OmegaConf or a dataclass raises in the block."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(explain(error, entry, schema)) from error


def to_dataclass(config: DictConfig, entry: str, schema: type[T]) -> T:
    """Return the dataclass of a composed configuration, with `~` expanded in paths.

    Raises UserError for names that it lacks and values that it refuses.
    """
    for name in _names_in(config):
        if name not in _names(schema):
            raise UserError(_unknown(name, entry, schema))
    for name in _names(schema):
        parent, _, last = name.rpartition(".")
        values = OmegaConf.select(config, parent) if parent else config
        if last not in values or OmegaConf.is_missing(values, last):
            raise UserError(f"setting '{name}' is required: give it as {name}=VALUE")
    with explained(entry, schema):
        result: T = OmegaConf.to_object(config)  # type: ignore[assignment]
    expand_home(result)
    return result


def as_text(override: str, schema: type, *, multirun: bool = False) -> str:
    """Quote the value of a text setting if it is no single value to Hydra.

    In a list, members that begin with `~` are quoted. Any other override is returned as
    it is, under `multirun` also values with commas.
    """
    name, equals, value = override.partition("=")
    types = types_of(_kind(name.lstrip("+"), schema))
    if equals and list[str] in types and value.startswith("["):
        return f"{name}={_HOME_IN_LIST.sub(_quoted, value)}"
    if not equals or str not in types:
        return override
    try:
        parsed = OverridesParser.create().parse_override(override)
        # Hydra would strip spaces, and write 1e3 as 1000.0.
        quoted = value.lstrip().startswith(("'", '"'))
        single = quoted or parsed.value() is None or "${" in value
        if single or (multirun and parsed.is_sweep_override()):
            return override
    except HydraException:
        pass
    return f"{name}={_quoted(value)}"


# A member of a list that begins with ~, which Hydra's grammar does not have, and has no quotes.
_HOME_IN_LIST = re.compile(r"(?<=[\[,])\s*~[^\[\],'\"$]*(?=[,\]])")


def _quoted(value: str | re.Match[str]) -> str:
    """Return a text within quotes of Hydra's grammar; of a match, without outer space."""
    value = value if isinstance(value, str) else value[0].strip()
    # Within quotes, backslashes before a quote, before ${ and at the end count twice.
    value = re.sub(r"(\\*)('|\$\{)", r"\1\1\\\2", value)
    value = re.sub(r"(\\+)\Z", r"\1\1", value)
    return f"'{value}'"


def with_files(overrides: Sequence[str], entry: str) -> list[str]:
    """Return overrides with GROUP=FILE.json as the group's choice `file`, of this FILE.

    Of groups that have this choice: a library's own settings.
    """
    result: list[str] = []
    for override in overrides:
        name, _, value = override.partition("=")
        choice = FOLDER / entry / name / "file.yaml"
        if value.endswith(".json") and name.isidentifier() and choice.is_file():
            result += [f"{name}=file", f"{name}.file={_quoted(value)}"]
        else:
            result.append(override)
    return result


def _kind(name: str, schema: Any) -> Any:
    """Return the type of a setting, Any within a library's own, None for no setting."""
    kind = schema
    for part in name.split("."):
        if get_origin(kind) is dict:
            return Any
        kind = kinds(kind).get(part) if is_dataclass(kind) else None
    return kind


def _names_in(config: DictConfig, prefix: str = "") -> list[str]:
    """Return the names of a composed configuration, none within a library's own settings."""
    names: list[str] = []
    for name in map(str, config):
        value = config._get_node(name)
        names.append(f"{prefix}{name}")
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            names += _names_in(value, f"{prefix}{name}.")
    return names


def _names(schema: Any, prefix: str = "") -> list[str]:
    """Return the names of all settings."""
    names: list[str] = []
    for name, kind in kinds(schema).items():
        nested = _names(kind, f"{prefix}{name}.") if is_dataclass(kind) else []
        names += [prefix + name, *nested]
    return names


# What Hydra and OmegaConf say, on one line, and what a user reads instead; `key` is the setting.
_WORDING = {
    r"Value '(.*)' of type '\w+' could not be converted to Integer": (
        "{key} must be a whole number, got {0}"
    ),
    r"Value '(.*)' of type '\w+' could not be converted to Float": (
        "{key} must be a number, got {0}"
    ),
    r"Value '(.*)' is not a valid bool": "{key} must be true or false, got {0}",
    r"(.*) Invalid value assigned: \w+ is not a ListConfig": (
        "{key} must be a list, got {0}. Write {key}=[{0}]"
    ),
    r"field '\w+' is not Optional": "{key} must have a value, got null",
    r"Interpolation key '(.*)' not found": (
        "{key} must refer to settings as ${{NAME}}, got ${{{0}}}, which is none"
    ),
    r"Ambiguous value for argument '(.*?)=(.*)' 1\.": (
        "{0} must be one value, got {1}. Write {0}=[{1}] for a list, or -m to run each"
    ),
}


def explain(error: Exception, entry: str, schema: type) -> str:
    """Return an error of Hydra, OmegaConf or a dataclass as one sentence.

    A name that is no setting is reported with the nearest one.
    """
    if isinstance(error, OverrideParseException):
        reason = str(error).partition("\n")[0]
        return (
            f"settings must be NAME=VALUE in Hydra's grammar, got {error.override}: {reason}. Quote the value "
            "twice: 'NAME=\"VALUE\"'"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        return f"{group} must be {any_of(error.options)}, got {choice or 'nothing'}"
    message = in_one_line(error, most=sys.maxsize)
    if isinstance(error.__cause__, OmegaConfBaseException):
        message += f" {in_one_line(error.__cause__, most=sys.maxsize)}"
    message, _, details = message.partition(" full_key: ")
    key = details.partition(" ")[0]
    if match := re.search(r"Could not override '(.*?)'\.", message):
        return _unknown(match[1], entry, schema)
    if match := re.match(r"Error merging override \+*(.*?)=", message):
        key = match[1]
        message = message.removeprefix(match[0])
    if key and _kind(key, schema) is None:
        return _unknown(key, entry, schema)
    for pattern, wording in _WORDING.items():
        if match := re.search(pattern, message):
            return wording.format(*match.groups(), key=key)
    return message


def _unknown(name: str, entry: str, schema: type) -> str:
    """Return a sentence on a name that is no setting, with the nearest one."""
    if _kind(name, schema) is Any:
        return f"setting '{name}' is new: write +{name}=VALUE to add it"
    groups = [path.name for path in (FOLDER / entry).iterdir() if path.is_dir()]
    near = difflib.get_close_matches(name, [*_names(schema), *groups], n=1)
    advice = f"did you mean '{near[0]}'?" if near else "--help lists the settings"
    return f"unknown setting '{name}': {advice}"
