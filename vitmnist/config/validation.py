"""Checks that Hydra lacks: unknown and missing keys, types, and bounds of numbers, with messages that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from vitmnist.errors import ConfigError, UnknownKeyError, first_line, nearest


def bounded(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field whose number `typed` holds between bounds."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    return field(default=default, metadata={name: bound for name, bound in bounds.items() if bound is not None})


AUTO = "auto"


def or_auto(default: Any = MISSING, **bounds: float) -> Any:
    """The same for a field that is typed `… | str`, whose only text is `auto`: what pays on the run's device."""
    item = bounded(default, **bounds)
    return field(default=default, metadata={**item.metadata, AUTO: True})


def typed(schema: type[Schema], values: Mapping[str, Any], key: str = "") -> Schema:
    """`values` as an instance of the dataclass `schema`.

    Every key must be there and none may be unknown: struct mode lets `+model.detph=3` through, and a key deleted
    with `~` would fall back to a default in silence.

    Args:
        key: where the values stand in the configuration, for the message.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a number out of its bounds.
    """
    try:
        plain = OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[call-overload]
        _check_keys(schema, plain, key)  # type: ignore[arg-type]
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except ValidationError as error:
        raise ConfigError(wrong_type(schema, error, key)) from error
    except MissingMandatoryValue as error:
        full = join(key, error.full_key)
        raise ConfigError(f"{full} is missing; type {full}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{join(key, error.full_key)}: {first_line(error)}") from error
    _check_bounds(options, key)
    return options  # type: ignore[return-value]


def wrong_type(schema: type, error: ValidationError, key: str = "") -> str:
    """What to say where OmegaConf could not convert a value to the type of its field in `schema`."""
    wanted: Any = schema
    for name in str(error.full_key).split("."):
        wanted = get_type_hints(wanted).get(name, Any) if is_dataclass(wanted) else Any
    full = join(key, error.full_key)
    value = "null" if error.value is None else error.value
    if get_origin(wanted) is dict:
        return f"{full}={value}: this is a config group; type {group_at(full)}=CHOICE"
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        names = [member.name for member in wanted]
        question = nearest(str(value), names)
        return f"{full}={value}: must be one of {', '.join(names)}{question and f'; {question}'}"
    allowed = _kinds(wanted)
    return f"{full}={value}: must be {allowed}" if allowed else f"{full}={value}: {first_line(error)}"


def _kinds(wanted: Any) -> str:
    """What a field of a type takes, for people."""
    kinds = (wanted,) if get_origin(wanted) is list else get_args(wanted) or (wanted,)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    names[list[int]] = "a list of whole numbers, as in '[2,4]'"
    if int in kinds or bool in kinds:
        names[str] = AUTO  # of `or_auto`
    return " or ".join(names[kind] for kind in kinds if kind in names)


def _check_keys(schema: type, values: Mapping[str, Any], key: str) -> None:
    known = {field.name: field for field in fields(schema)}
    for name in values:
        if name not in known:
            raise UnknownKeyError(join(key, name), known, values[name])
    for name, item in known.items():
        full = join(key, name)
        if values.get(name, MISSING) == MISSING:
            is_group = str(item.type).startswith("dict")
            example = f"{group_at(full)}=CHOICE" if is_group else f"{full}=VALUE"
            raise ConfigError(f"{full} is missing; type {example}")
        if isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            _check_keys(item.default_factory, values[name], full)


def _check_bounds(options: Any, key: str) -> None:
    holds = {
        "at least": lambda value, bound: value >= bound,
        "above": lambda value, bound: value > bound,
        "at most": lambda value, bound: value <= bound,
        "below": lambda value, bound: value < bound,
    }
    for item in fields(options):
        value = getattr(options, item.name)
        full = join(key, item.name)
        bounds = {name: bound for name, bound in item.metadata.items() if name in holds}
        if is_dataclass(value):
            _check_bounds(value, full)
        elif AUTO in item.metadata and isinstance(value, str):
            if value != AUTO:
                raise ConfigError(f"{full}={value}: must be {_kinds(get_type_hints(type(options))[item.name])}")
        # `not holds` also refuses NaN, which compares false with everything; infinity would pass a lower bound.
        elif bounds and isinstance(value, float) and math.isinf(value):
            raise ConfigError(f"{full}={value}: must be finite")
        elif value is not None and any(not holds[name](value, bound) for name, bound in bounds.items()):
            allowed = " and ".join(f"{name} {bound}" for name, bound in bounds.items())
            raise ConfigError(f"{full}={value}: must be {allowed}")


def join(key: str, name: object) -> str:
    """The full name of `name` under `key`, which may be empty."""
    return f"{key}.{name}" if key else str(name)


def group_at(place: str) -> str:
    """What chooses the member at a place of the configuration: `data/loader`, `data/loader@data.loader.base`."""
    return f"data/loader@{place}" if place.startswith("data.loader.") else place.replace(".", "/")


Schema = TypeVar("Schema")


NoneType = type(None)
