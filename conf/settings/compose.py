"""Compose a stage's settings: YAML of `conf/<entry>` and overrides -> its dataclass.

The command line follows Hydra's grammar, https://hydra.cc/docs/advanced/override_grammar/basic/,
with one exception: if the value of a text setting is not a single value in that grammar, the
whole value is taken literally. So `prompt="def f(a, b):"` and `out="runs/a (1)"` need no second
pair of quotes. `prompt=null`, `vocab.bos='<x>'` and `out='runs/${seed}'` keep their meaning in
Hydra. `DictConfig` is used only in this file and cli.py.
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
from conf.settings.paths import expand_home
from conf.settings.schema import any_of, field_types, union_members

T = TypeVar("T")
FOLDER = Path(__file__).parent.parent
PLUGINS = {  # Hydra's launchers and sweepers, by their packages
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "optuna": "hydra-optuna-sweeper",
}
GROUPS = """
Groups of settings: GROUP=CHOICE
$APP_CONFIG_GROUPS
"""
HELP = """${hydra.help.header}{groups}
Settings: NAME=VALUE, here with their defaults; ??? is required
$CONFIG
--cfg job prints the composed settings and exits; -m runs every combination of comma-separated values;
--config-dir DIR adds a folder of your own YAML files. docs/settings.md describes each setting.
"""


def register(schema: type, *, command: bool = True, groups: bool = True) -> None:
    """Register a stage's dataclass as `schema`, and settings of Hydra itself.

    `groups` is False for a command without groups of settings, which its help then leaves out.

    Hydra writes no files and sets up no logging. Its sweeper needs a folder and gets a
    temporary one. Without `command` a composition does not read the settings of launchers,
    sweepers and help, which take a third of its time.
    """
    OmegaConf.register_new_resolver("sysconfig", sysconfig.get_path, replace=True)
    OmegaConf.register_new_resolver(
        "temporary_folder", _temporary_folder, replace=True, use_cache=True
    )
    store = ConfigStore.instance()
    # A dataclass is converted when it is stored, which takes a quarter of a composition's time.
    stored = store.repo.get("schema.yaml")
    if stored is None or OmegaConf.get_type(stored.node) is not schema:
        store.store(name="schema", node=schema)
    provider = "command" if command else "composition"
    if store.repo["hydra"]["config.yaml"].provider != provider:
        node = _hydra_settings(command, GROUPS if groups else "")
        store.store(group="hydra", name="config", node=node, provider=provider)


def _hydra_settings(command: bool, groups: str) -> HydraConf:
    defaults = [
        {"launcher": "basic"},
        {"sweeper": "basic"},
        {"hydra_help": "default"},
        {"hydra_logging": "none"},
        {"job_logging": "none"},
        {"callbacks": None},
        {"env": "default"},
    ]
    return HydraConf(
        defaults=defaults if command else [],
        run=RunDir("."),
        sweep=SweepDir("${temporary_folder:}", "."),
        output_subdir=None,
        help=HelpConf(
            app_name="", header="", footer="", template=HELP.replace("{groups}", groups)
        ),
    )


def _temporary_folder() -> str:
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def settings(entry: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Compose `conf/<entry>/config.yaml` with `overrides` into an instance of `schema`.

    Raises UserError for an unknown setting, a value of the wrong type, a missing value or
    a combination that the dataclass refuses.
    """
    register(schema, command=False)
    overrides = [
        quote_text(text, schema) for text in replace_file_choices(overrides, entry)
    ]
    folder = str(FOLDER / entry)
    with (
        translate_errors(entry, schema),
        initialize_config_dir(folder, version_base=None),
    ):
        config = compose("config", overrides=overrides)
    return to_dataclass(config, entry, schema)


@contextmanager
def translate_errors(entry: str, schema: type) -> Iterator[None]:
    """Raise errors of Hydra, OmegaConf and the dataclass in the block as UserError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(explain(error, entry, schema)) from error


def to_dataclass(config: DictConfig, entry: str, schema: type[T]) -> T:
    """Return a composed configuration as its dataclass, with `~` expanded in paths.

    Raises UserError for unknown or missing settings and for values that the dataclass refuses.
    """
    names = _names(schema)
    for name in _names_in(config):
        if name not in names:
            raise UserError(_unknown(name, entry, schema))
    for name in names:
        parent, _, last = name.rpartition(".")
        values = OmegaConf.select(config, parent) if parent else config
        if last not in values or OmegaConf.is_missing(values, last):
            raise UserError(f"setting '{name}' is required: give it as {name}=VALUE")
    with translate_errors(entry, schema):
        result: T = OmegaConf.to_object(config)  # type: ignore[assignment]
    expand_home(result)
    return result


def quote_text(override: str, schema: type, *, multirun: bool = False) -> str:
    """Quote the value of a text setting if Hydra would not parse it as a single value.

    In a list, members that begin with `~` are quoted. Any other override is returned
    unchanged. With `multirun`, so are values with commas, which Hydra sweeps over.
    """
    name, equals, value = override.partition("=")
    types = union_members(_type_of(name.lstrip("+"), schema))
    if equals and list[str] in types and value.startswith("["):
        value = _HOME_IN_LIST.sub(lambda match: in_quotes(match[0].strip()), value)
        return f"{name}={value}"
    if not equals or str not in types:
        return override
    try:
        parsed = OverridesParser.create().parse_override(override)
        # Hydra would strip spaces and rewrite 1e3 as 1000.0.
        quoted = value.lstrip().startswith(("'", '"'))
        single = quoted or parsed.value() is None or "${" in value
        if single or (multirun and parsed.is_sweep_override()):
            return override
    except HydraException:  # only in quotes is the value in Hydra's grammar
        pass
    return f"{name}={in_quotes(value)}"


# An unquoted member of a list that begins with ~, which Hydra's grammar does not allow.
_HOME_IN_LIST = re.compile(r"(?<=[\[,])\s*~[^\[\],'\"$]*(?=[,\]])")


def in_quotes(value: str, *, interpolates: bool = False) -> str:
    """Return a text in Hydra's quotes. With `interpolates`, ${NAME} in it is not escaped."""
    # Within quotes, backslashes before a quote, before ${ and at the end must be doubled.
    escaped = "'" if interpolates else r"'|\$\{"
    value = re.sub(rf"(\\*)({escaped})", r"\1\1\\\2", value)
    value = re.sub(r"(\\+)\Z", r"\1\1", value)
    return f"'{value}'"


def replace_file_choices(overrides: Sequence[str], entry: str) -> list[str]:
    """Replace GROUP=FILE.json by GROUP=file and GROUP.file=FILE.json.

    This applies to groups with a file.yaml: settings of another library, such as DeepSpeed.
    """
    result: list[str] = []
    for override in overrides:
        name, _, value = override.partition("=")
        choice = FOLDER / entry / name / "file.yaml"
        if value.endswith(".json") and name.isidentifier() and choice.is_file():
            result += [f"{name}=file", f"{name}.file={in_quotes(value)}"]
        else:
            result.append(override)
    return result


def _type_of(name: str, schema: Any) -> Any:
    """Return the type of a setting: Any for a setting of another library, None if unknown."""
    kind = schema
    for part in name.split("."):
        if get_origin(kind) is dict:
            return Any
        kind = field_types(kind).get(part) if is_dataclass(kind) else None
    return kind


def _names_in(config: DictConfig, prefix: str = "") -> list[str]:
    """Return the names in a composed configuration, except within settings of another library."""
    names: list[str] = []
    for name in map(str, config):
        value = config._get_node(name)
        names.append(f"{prefix}{name}")
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            names += _names_in(value, f"{prefix}{name}.")
    return names


def _names(schema: Any, prefix: str = "") -> list[str]:
    """Return the names of all settings of a schema."""
    names: list[str] = []
    for name, kind in field_types(schema).items():
        nested = _names(kind, f"{prefix}{name}.") if is_dataclass(kind) else []
        names += [prefix + name, *nested]
    return names


# Messages of Hydra and OmegaConf, as patterns, and the messages that replace them; `key` is the setting.
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
    r"field '[\w.]+' is not Optional": "{key} must have a value, got null",
    r"Invalid type assigned: NoneType": "{key} must have no null in its list",
    r"Interpolation key '(.*)' not found": (
        "{key} must refer to an existing setting by ${{NAME}}, got ${{{0}}}"
    ),
    r"Ambiguous value for argument '(.*?)=(.*)' 1\.": (
        "{0} must be one value, got {1}. Write {0}=[{1}] for a list, or -m to run each"
    ),
}


def explain(error: Exception, entry: str, schema: type) -> str:
    """Return the message for an error of Hydra, OmegaConf or a settings dataclass.

    For an unknown setting the message suggests the setting with the most similar name.
    """
    if isinstance(error, OverrideParseException):
        reason = str(error).partition("\n")[0]
        quoted = "each member as \"NAME=['MEMBER']\""
        if "=[" not in str(error.override):
            quoted = "the value as 'NAME=\"VALUE\"'"
        return f"settings must be NAME=VALUE in Hydra's grammar, got {error.override}: {reason}. Quote {quoted}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if package := PLUGINS.get(choice) if group.startswith("hydra/") else None:
            return f"{group}={choice} needs the package {package}, got none. Install it: pip install {package}"
        # Hydra gives no options for a list of choices, such as benchmarks=[humaneval,all].
        files = (FOLDER / entry / group).glob("*.yaml")
        if options := error.options or sorted(file.stem for file in files):
            return f"{group} must be {any_of(options)}, got {choice or 'nothing'}"
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
    if key and _type_of(key, schema) is None:
        return _unknown(key, entry, schema)
    for pattern, wording in _WORDING.items():
        if match := re.search(pattern, message):
            return wording.format(*match.groups(), key=key)
    return message


def _unknown(name: str, entry: str, schema: type) -> str:
    """Return the message for an unknown setting, with the most similar name."""
    if _type_of(name, schema) is Any:
        return f"setting '{name}' is new: write +{name}=VALUE to add it"
    groups = [path.name for path in (FOLDER / entry).iterdir() if path.is_dir()]
    near = difflib.get_close_matches(name, [*_names(schema), *groups], n=1)
    advice = f"did you mean '{near[0]}'?" if near else "--help lists the settings"
    return f"unknown setting '{name}': {advice}"
