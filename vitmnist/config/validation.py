"""Checks that Hydra lacks: unknown and missing keys, and bounds of numbers, with messages that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import MISSING, OmegaConf, errors

from vitmnist.config import is_group
from vitmnist.errors import ConfigError, UnknownKeyError, first_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = TypeVar("Schema", bound="DataclassInstance")
Value = TypeVar("Value")

AUTO = "auto"
BOUNDS = {"at_least": ge, "above": gt, "at_most": le, "below": lt}
"""The metadata of a field that are bounds of a number, or of each number in a list, tuple or dict."""


def config_field(default: Value = MISSING, **metadata: object) -> Value:
    """A dataclass field whose metadata describe its key: `BOUNDS`, and those of `vitmnist.config.schema`."""
    return field(default=default, metadata=metadata)


bounded = config_field  # for numbers


def or_auto(default: Value = MISSING, **bounds: object) -> Value:
    """As `bounded`, for a field of type `… | str` whose only allowed string is `auto`."""
    return field(default=default, metadata={**bounds, "auto": True})


def group(registry: str, default: Value = MISSING, **metadata: object) -> Value:
    """A field for a config group: a section whose `name` chooses a member of the registry at `module:NAME`."""
    return field(default=default, metadata={"registry": registry, **metadata})


def section(schema: Callable[[], Value], **metadata: object) -> Value:
    """A field for the keys of a dataclass, or for a dict whose keys are free."""
    return field(default_factory=schema, metadata=metadata)


def validate(schema: type[Schema], values: Mapping[str, Any], key: str = "") -> Schema:
    """`values` as an instance of the dataclass `schema`.

    Struct mode lets `+model.detph=3` through, and a key deleted with `~` would silently fall back to its default. Here
    both are errors: the values are merged into a schema without defaults.

    Args:
        key: the key of `values` in the configuration, for messages.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a number out of bounds.
    """
    try:
        plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        typed = OmegaConf.structured(schema)
        for item in fields(schema):
            typed[item.name] = MISSING
        options = cast(Schema, OmegaConf.to_object(OmegaConf.merge(typed, escaped(plain))))
    except errors.ConfigKeyError as error:
        allowed = [item.name for item in fields(error.object_type)]  # type: ignore[arg-type]
        raise UnknownKeyError(join(key, error.full_key), allowed) from error
    except errors.MissingMandatoryValue as error:
        full = join(key, error.full_key)
        path = full.replace(".", "/")
        example = f"{path}=NAME" if is_group(path) else f"{full}={'[]' if full == 'logger' else 'VALUE'}"
        raise ConfigError(f"{full} is missing; type {example}") from error
    except errors.OmegaConfBaseException as error:
        raise ConfigError(refused_value(error, key)) from error
    _check_bounds(options, key)
    return options


def escaped(value: object) -> Any:
    """Plain values in which OmegaConf takes `${` as text."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def refused_value(error: errors.OmegaConfBaseException, key: str = "") -> str:
    """The message for a value that OmegaConf refuses; `key` is its section."""
    full = join(key, error.full_key) if error.full_key else ""
    if isinstance(error, errors.ValidationError):
        path = full.replace(".", "/")
        reason = f"this is a config group; type {path}=NAME" if is_group(path) else first_line(error)
        return f"{full}={'null' if error.value is None else error.value}: {reason}"
    advice = r"; for the text ${ write \${" if isinstance(error, errors.InterpolationResolutionError) else ""
    return f"{full}: ".removeprefix(": ") + first_line(error) + advice


def _check_bounds(options: DataclassInstance, key: str) -> None:
    for item in fields(options):
        value, full = getattr(options, item.name), join(key, item.name)
        bounds = {name: bound for name, bound in item.metadata.items() if name in BOUNDS}
        allowed = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        if is_dataclass(value) and not isinstance(value, type):
            _check_bounds(value, full)
        elif AUTO in item.metadata and isinstance(value, str):
            if value != AUTO:
                raise ConfigError(f"{full}={value}: must be {str(item.type).replace('str', AUTO)}")
        elif bounds and isinstance(value, list | tuple):
            is_interval = len(value) == 2 and value[0] <= value[1] < math.inf
            if not is_interval or not all(_is_within(number, bounds) for number in value):
                raise ConfigError(f"{full}={list(value)}: must be two numbers, the lower one first, {allowed}")
        elif bounds or isinstance(value, float):
            numbers = {join(full, name): number for name, number in value.items()} if isinstance(value, dict) else {}
            for name, number in (numbers or {full: value}).items():
                if isinstance(number, float) and not math.isfinite(number):  # infinity would pass a lower bound
                    raise ConfigError(f"{name}={number}: must be finite")
                if isinstance(number, int | float) and not _is_within(number, bounds):
                    raise ConfigError(f"{name}={number}: must be {allowed}")


def _is_within(number: float, bounds: Mapping[str, float]) -> bool:
    return all(BOUNDS[name](number, bound) for name, bound in bounds.items())


def join(key: str, name: object) -> str:
    """The full name of `name` under `key`, which may be empty."""
    return f"{key}.{name}" if key else str(name)
