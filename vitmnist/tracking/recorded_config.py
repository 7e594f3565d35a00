"""Reads the recorded configuration of a run, and applies overrides to it.

The record is treated as data: it is checked against the schema, and never passed to Hydra, interpolated or imported.
"""

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from vitmnist.config import is_group, is_hydra_override
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config, fill_defaults
from vitmnist.config.validation import escape_interpolations, validate
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import UnreadableError, display_path, read_json_or_yaml
from vitmnist.tracking.result import CONFIG_FILE


def load_recorded_config(folder: Path, overrides: list[str]) -> Config:
    """Load the configuration of the last start of a run, and apply overrides.

    Overrides of Hydra's keys are used only to find the members of groups. An override of a group replaces its section,
    unless it selects the recorded member.

    Raises:
        ConfigError: the folder holds no run, its record is damaged, or an override is not allowed when resuming.
        HydraException, OmegaConfBaseException: an override is invalid.
    """
    config = OmegaConf.create(escape_interpolations(_recorded_values(folder)))
    hydra_overrides = [*filter(is_hydra_override, overrides)]
    changes = OverridesParser.create().parse_overrides([text for text in overrides if not is_hydra_override(text)])
    # Apply members of groups first, then members within other members, then keys.
    for change in sorted(changes, key=lambda item: (not is_group(item.key_or_group), item.package is not None)):
        _apply(config, change, hydra_overrides)
    # This also refuses unknown keys.
    return validate(Config, config)


def _apply(config: DictConfig, override: Override, hydra_overrides: list[str]) -> None:
    key, value = override.key_or_group, override.value()
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(
            f"{override.input_line}: cannot be combined with resume=; set keys such as epochs=10, or data/loader=NAME"
        )
    if not is_group(key):
        OmegaConf.update(config, key, value, merge=key != "lr_scale")
        return
    section = key.replace("/", ".")
    target = override.package or section
    if OmegaConf.select(config, f"{target}.name") != value:
        member = OmegaConf.select(compose([*hydra_overrides, f"{key}={value}"]), section)
        OmegaConf.update(config, target, member, merge=False)


def _recorded_values(folder: Path) -> dict[str, object]:
    source = folder / CONFIG_FILE
    try:
        recorded = read_json_or_yaml(source)
        if not isinstance(recorded, dict):
            raise UnreadableError("does not contain the configuration of a run")
        values = fill_defaults({key: value for key, value in recorded.items() if key != "hydra"})
        validate(Config, values)
    except FileNotFoundError as error:
        path = display_path(folder)
        raise ConfigError(f"{path}: holds no run; pass a folder such as outputs/runs/DATE/TIME-…") from error
    except (UnreadableError, ConfigError) as error:
        raise ConfigError(f"{display_path(source)}: {error}; restore the file, or start a new run") from error
    return values
