"""Checks that Hydra lacks: unknown and missing keys, and bounds of numbers, with messages that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from operator import ge, gt, le, lt
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf, errors

from vitmnist.errors import ConfigError, UnknownKeyError, first_line, nearest

Schema = TypeVar("Schema")

AUTO = "auto"
BOUNDS = {"at_least": ge, "above": gt, "at_most": le, "below": lt}
"""The metadata of a field that are bounds of a number, or of each number in a list, tuple or dict."""


def described(default: Any = MISSING, **metadata: Any) -> Any:
    """A dataclass field whose metadata describe its key: `BOUNDS`, and those of `vitmnist.config.schema`."""
    return field(default=default, metadata=metadata)


bounded = described  # for numbers


def or_auto(**bounds: Any) -> Any:
    """As `bounded`, for a field of type `… | str` whose only allowed string is `auto`."""
    return bounded(**bounds, auto=True)


def group(registry: str, **metadata: Any) -> Any:
    """A field for a config group: a section whose `name` chooses a member of the registry at `module:NAME`."""
    return described(registry=registry, **metadata)


def section(schema: type, **described: Any) -> Any:
    """A field for the keys of a dataclass, or for a dict whose keys are free."""
    return field(default_factory=schema, metadata=described)


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
        for item in fields(schema):  # type: ignore[arg-type]
            typed[item.name] = MISSING
        options = OmegaConf.to_object(OmegaConf.merge(typed, escaped(plain)))
    except errors.ValidationError as error:
        raise ConfigError(wrong_type(schema, error, key)) from error
    except errors.ConfigKeyError as error:
        allowed = [item.name for item in fields(error.object_type)]  # type: ignore[arg-type]
        raise UnknownKeyError(join(key, error.full_key), allowed) from error
    except errors.MissingMandatoryValue as error:
        full, siblings = join(key, error.full_key), getattr(error.object_type, "__dataclass_fields__", {})
        is_group = error.key in siblings and str(siblings[error.key].type) == "dict[str, Any]"
        example = f"{group_at(full)}=NAME" if is_group else f"{full}={'[]' if full == 'logger' else 'VALUE'}"
        raise ConfigError(f"{full} is missing; type {example}") from error
    except errors.OmegaConfBaseException as error:
        raise ConfigError(refused_value(error, key)) from error
    _check_bounds(options, key)
    return options  # type: ignore[return-value]


def escaped(value: Any) -> Any:
    """Plain values in which OmegaConf takes `${` as text."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def refused_value(error: errors.OmegaConfBaseException, key: str = "") -> str:
    """The message for a value that OmegaConf refuses; `key` is its section."""
    full = f"{join(key, error.full_key)}: " if error.full_key else ""
    is_interpolation = isinstance(error, errors.InterpolationResolutionError)
    return f"{full}{first_line(error)}" + r"; for the text ${ write \${" * is_interpolation


def wrong_type(schema: type, error: errors.ValidationError, key: str = "") -> str:
    """The message for a value that OmegaConf could not convert to the type of its field in `schema`."""
    kind: Any = schema
    for name in str(error.full_key).split("."):
        kind = get_type_hints(kind).get(name, Any) if is_dataclass(kind) else Any
    full = join(key, error.full_key)
    value = "null" if error.value is None else error.value
    if kind == dict[str, Any]:
        return f"{full}={value}: this is a config group; type {group_at(full)}=NAME"
    for member_of in get_args(kind) or (kind,):
        if isinstance(member_of, type) and issubclass(member_of, Enum):
            names = [member.name for member in member_of] + ["null"] * (type(None) in get_args(kind))
            question = nearest(str(value), names)
            return f"{full}={value}: must be one of {', '.join(names)}{question and f'; {question}'}"
    allowed = allowed_kinds(kind)
    return f"{full}={value}: must be {allowed}" if allowed else f"{full}={value}: {first_line(error)}"


def allowed_kinds(kind: Any) -> str:
    """`a whole number or null` for `int | None`."""
    kinds = (kind,) if get_origin(kind) in (list, tuple, dict) else get_args(kind) or (kind,)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    names[list[int]] = "a list of whole numbers, as in '[2,4]'"
    names[tuple[float, float]] = "a list of two numbers, as in '[0.5,1.0]'"
    names[list[Any]], names[list[str]] = "a list", "a list of texts, as in '[a,b]'"
    names[dict[str, float]] = "names with a number each, as in '{a:0.1,b:1}'"
    if {int, float, bool}.intersection(kinds):
        names[str] = AUTO  # a field of `or_auto`
    return " or ".join(names[kind] for kind in kinds if kind in names)


def _check_bounds(options: Any, key: str) -> None:
    for item in fields(options):
        value, full = getattr(options, item.name), join(key, item.name)
        bounds = {name: bound for name, bound in item.metadata.items() if name in BOUNDS}
        allowed = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        if is_dataclass(value):
            _check_bounds(value, full)
        elif AUTO in item.metadata and isinstance(value, str):
            if value != AUTO:
                raise ConfigError(f"{full}={value}: must be {allowed_kinds(get_type_hints(type(options))[item.name])}")
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


def group_at(section: str) -> str:
    """The override key that selects the member of a section: `data/loader`, `data/loader@data.loader.base`."""
    return f"data/loader@{section}" if section.startswith("data.loader.") else section.replace(".", "/")
