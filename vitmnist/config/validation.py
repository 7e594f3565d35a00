"""Checks that Hydra lacks: unknown keys, missing keys and bounds of numbers. Each message names the key."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from omegaconf import MISSING, EnumNode, OmegaConf, errors

from vitmnist.errors import ConfigError, UnknownKeyError, first_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = TypeVar("Schema", bound="DataclassInstance")
Value = TypeVar("Value")

AUTO = "auto"
"""The value of a key whose value the program chooses."""
BOUNDS = {"at_least": ge, "above": gt, "at_most": le, "below": lt}
"""The comparison for each bound of `KeyMetadata`."""


@dataclass(frozen=True)
class KeyMetadata:
    """The metadata of a field: properties of its key, or of all keys of its section."""

    # The bounds of a number, or of each number in a list, tuple or dict
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    is_range: bool = False  # The value is a pair of numbers, the lower one first.
    has_free_keys: bool = False  # The value is a dict whose keys are the user's, and whose order matters.
    allows_auto: bool = False  # The value can also be `auto`; no other text is allowed.
    registry: str | None = None  # The key is a config group, registered at `module:NAME`; its `name` chooses a member.
    # What the key can change. `time_and_rounding` includes the batch statistics of a microbatch.
    affects: Literal["result", "time_and_rounding", "nothing"] = "result"
    may_change_on_resume: bool = False  # A resumed run may have another value, although the key affects the result.
    # The key selects images of a dataset: it divides them into splits, seeds the division, or limits a split.
    image_selection: Literal["splits", "seed", "train", "test"] | None = None
    keeps_all: float | None = None  # The value with which a key of an `image_selection` keeps all images.


def config_field(default: Value = MISSING, **metadata: Any) -> Value:
    """Declare a key as a dataclass field. The keywords are the fields of `KeyMetadata`, such as `at_least=1`."""
    return field(default=default, metadata={"key": KeyMetadata(**metadata)})


def section(schema: Callable[[], Value], **metadata: Any) -> Value:
    """Declare a section: the keys of a dataclass, or a dict with any keys."""
    return field(default_factory=schema, metadata={"key": KeyMetadata(**metadata)})


def get_metadata(option: Field[Any]) -> KeyMetadata:
    """Return what a field declares about its key; a plain field declares nothing."""
    return cast(KeyMetadata, option.metadata.get("key", KeyMetadata()))


def validate(schema: type[Schema], values: Mapping[str, Any], key: str = "") -> Schema:
    """Convert `values`, the section `key` of the configuration, to an instance of the dataclass `schema`.

    Struct mode lets `+model.detph=3` through, and a key deleted with `~` would silently fall back to its default. Here
    both are errors: the values are merged into a schema without defaults.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a number out of bounds.
    """
    try:
        plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        structured = OmegaConf.structured(schema)
        for option in fields(schema):
            structured[option.name] = MISSING
        options = cast(Schema, OmegaConf.to_object(OmegaConf.merge(structured, escape_interpolations(plain))))
    except errors.ConfigKeyError as error:
        allowed = [option.name for option in fields(error.object_type)]  # type: ignore[arg-type]
        raise UnknownKeyError(join_key(key, error.full_key), allowed) from error
    except errors.MissingMandatoryValue as error:
        raise ConfigError(f"{join_key(key, error.full_key)} is missing") from error
    except errors.OmegaConfBaseException as error:
        raise ConfigError(describe_refused_value(error, key)) from error
    _check_values(options, key)
    return options


def read_size(key: str, size: object) -> tuple[int, int]:
    """Return the height and width that a key has; raises `ConfigError` unless it is a number of pixels or a pair."""
    sides: list[Any] = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or any(type(side) is not int for side in sides):
        raise ConfigError(f"{key}={size}: must be a number of pixels, or [height, width]")
    return sides[0], sides[1]


def escape_interpolations(value: object) -> Any:
    """Escape `${` so that OmegaConf takes it as text."""
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def describe_refused_value(error: errors.OmegaConfBaseException, key: str = "") -> str:
    """Describe why OmegaConf refuses a value; `key` is its section."""
    full = join_key(key, error.full_key) if error.full_key else ""
    reason = first_line(error)
    if isinstance(error, errors.ValidationError):
        # For an enum, the message of OmegaConf lists the members.
        if is_dataclass(error.object_type) and not isinstance(error.child_node, EnumNode):
            (option,) = (option for option in fields(error.object_type) if option.name == error.key)
            group = full.replace(".", "/")
            is_group = get_metadata(option).registry
            reason = f"this is a config group; set {group}=NAME" if is_group else f"must be {_allowed_types(option)}"
        full += f"={'null' if error.value is None else error.value}"
    return f"{full}: {reason}" if full else reason


def _allowed_types(option: Field[Any]) -> str:
    """Format the types of a field as a user writes them, such as `int | auto | null`."""
    types = option.type if isinstance(option.type, str) else inspect.formatannotation(option.type)
    return types.replace("None", "null").replace("str", AUTO if get_metadata(option).allows_auto else "str")


def _check_values(options: DataclassInstance, key: str) -> None:
    for option in fields(options):
        value, metadata = getattr(options, option.name), get_metadata(option)
        full = join_key(key, option.name)
        if is_dataclass(value) and not isinstance(value, type):
            _check_values(value, full)
        elif metadata.allows_auto and isinstance(value, str):
            if value != AUTO:
                raise ConfigError(f"{full}={value}: must be {_allowed_types(option)}")
        elif isinstance(value, list | tuple):
            if metadata.is_range and (len(value) != 2 or value[0] > value[1]):
                raise ConfigError(f"{full}={list(value)}: must be two numbers, the lower one first")
            for item in value:
                _check_number(full, item, metadata)
        elif isinstance(value, dict):
            for name, item in value.items():
                _check_number(join_key(full, name), item, metadata)
        else:
            _check_number(full, value, metadata)


def _check_number(key: str, value: object, metadata: KeyMetadata) -> None:
    if not isinstance(value, int | float):
        return
    # Infinity would pass a lower bound.
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be finite")
    bounds = {name: bound for name in BOUNDS if (bound := getattr(metadata, name)) is not None}
    if not all(BOUNDS[name](value, bound) for name, bound in bounds.items()):
        allowed = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        raise ConfigError(f"{key}={value}: must be {allowed}")


def join_key(key: str, name: object) -> str:
    """Join a section and a name to a dotted key; the section can be empty."""
    return f"{key}.{name}" if key else str(name)
