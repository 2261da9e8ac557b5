"""YAML and overrides composed into a stage's dataclass. `DictConfig` never leaves this file."""

import sysconfig
from collections.abc import Sequence
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf import overrides as given
from conf.choices import FOLDER, groups
from conf.errors import UserError
from conf.links import named
from conf.mistakes import explain
from conf.paths import check_paths
from conf.values import check_values

T = TypeVar("T")


def settings(entry: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Compose `conf/<entry>/config.yaml` with `overrides` into an instance of `schema`.

    Raises UserError for an unknown setting, a value of the wrong type, a missing value
    or a combination that the dataclass refuses.
    """
    config = _compose(entry, schema, overrides)
    names = tuple(group.name for group in groups(entry))
    try:
        check_values(OmegaConf.to_container(config), schema)
        instance: T = OmegaConf.to_object(config)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(explain(error, schema, names)) from error
    except (ValueError, TypeError) as error:
        sentence = str(error)
        message = sentence if named(sentence, schema, names) else f"settings of {entry}: {sentence}"
        raise UserError(message) from error
    check_paths(instance)
    return instance


def composed(entry: str, schema: type, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings as plain values; a required one that is missing is "???". Raises as `settings`."""
    values = OmegaConf.to_container(_compose(entry, schema, overrides), resolve=False)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def as_yaml(entry: str, schema: type, overrides: Sequence[str] = ()) -> str:
    """Return the same as YAML."""
    return OmegaConf.to_yaml(_compose(entry, schema, overrides), resolve=False)


def _required(name: str) -> None:
    """`${required:NAME}` in the YAML: ??? for a setting that has a default, over which ??? is ignored."""
    raise MissingMandatoryValue(f"Missing mandatory value: {name}")


def _compose(entry: str, schema: type, overrides: Sequence[str]) -> DictConfig:
    OmegaConf.register_new_resolver("sysconfig", sysconfig.get_path, replace=True)
    OmegaConf.register_new_resolver("required", _required, replace=True)
    # The dataclass is the first of the YAML's defaults: it gives every setting its type.
    ConfigStore.instance().store(name="schema", node=schema)
    chosen = groups(entry)
    overrides = [given.unsigned(text) for text in overrides]
    given.check(overrides, schema, chosen)
    # So do the settings by name, of those names that no YAML has.
    members = given.members(overrides, schema)
    ConfigStore.instance().store(group="members", name="members", node=members, package="_global_")
    accepted = [given.quoted(text, schema, chosen) for text in overrides if not given.is_default(text, chosen)]
    for text in accepted:
        _check_readable(text)
    try:
        with initialize_config_dir(str(FOLDER / entry), version_base=None):
            return compose("config", overrides=[*accepted, "+members=members"] if members else accepted)
    except (HydraException, OmegaConfBaseException, OverflowError) as error:  # the last: no float is so large
        raise UserError(explain(error, schema, [group.name for group in chosen])) from error


def _check_readable(override: str) -> None:
    name, _, value = override.partition("=")
    name = given.unsigned(name)
    try:
        several = OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException as error:
        raise UserError(f"{name} must be a value such as 3, true, [1,2] or a word, got {value}") from error
    if several:  # Hydra's, for a run with each
        raise UserError(f"{name} must be one value, got {value}")
