"""The schema of the configuration, and the checks that Hydra lacks.

Hydra composes `conf/*.yaml` over `Config`, so that a wrong type is refused before anything starts. The options of a
group with several members (a model, a loader, an optimizer) stand beside the code that reads them, and the member's
registry turns them into its dataclass with `typed`. This file imports no torch: `--help` answers at once.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from vitmnist.errors import ConfigError, UnknownKeyError, first_line, nearest

PACKAGE = Path(__file__).resolve().parent
# A wheel carries conf/ inside the package; in a source tree it stands beside it.
CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())

# What tells nothing of what a run learns or measures: keys, and sections of them.
ASIDE = ("checkpoint", "data.root", "distributed", "max_minutes", "repeat", "repeats", "resume", "sweep", "tensorboard")
UNNAMED = ("data.root", "repeats")  # what a folder is not named after

Schema = TypeVar("Schema")
NoneType = type(None)


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


class Shuffle(str, Enum):
    """How an epoch is ordered; see `vitmnist.data.order`."""

    sample = "sample"
    batch = "batch"
    none = "none"


@dataclass
class DataConfig:
    """`data`: what is loaded, in which order, and how."""

    root: str = MISSING
    shuffle: Shuffle = MISSING
    holdout: int | None = bounded(at_least=1)
    drop_last: bool = MISSING
    dataset: dict[str, Any] = MISSING
    loader: dict[str, Any] = MISSING
    augment: dict[str, Any] = MISSING


class Precision(str, Enum):
    """With how many digits products are computed; see `vitmnist.training.gradient`."""

    auto = "auto"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


@dataclass
class TrainerConfig:
    """`trainer`: how a step is computed, which changes what is learnt by rounding alone."""

    micro_batch: int | str | None = or_auto(at_least=1)
    compile: bool | str = or_auto()
    precision: Precision = MISSING
    fused: bool | str = or_auto()
    cuda_graph: bool | str = or_auto()


@dataclass
class CheckpointConfig:
    """`checkpoint`: how often a run is saved, beside at its end and when it is stopped."""

    every_epochs: int | None = bounded(at_least=1)
    every_minutes: float | None = bounded(above=0)


@dataclass
class TensorBoardConfig:
    """`tensorboard`: how often what is not a figure of an epoch is written."""

    every_steps: int | None = bounded(at_least=1)
    images_every_epochs: int | None = bounded(at_least=1)


@dataclass
class DistributedConfig:
    """`distributed`: several processes that train together, under `torchrun`."""

    timeout_s: float = bounded(above=0, at_most=1e6)


class Objective(str, Enum):
    """What a search looks for; see `vitmnist.sweep`."""

    val_acc = "val_acc"
    seconds_to_target = "seconds_to_target"


@dataclass
class SweepConfig:
    """`sweep`: how a sweep goes on, and what its jobs tell a search."""

    resume: str | None = MISSING
    objective: Objective = MISSING
    target_acc: float = bounded(above=0, at_most=100)


@dataclass
class Config:
    """The whole configuration. Defaults stand in `conf/`, where each key is explained."""

    batch_size: int = bounded(at_least=1)
    epochs: int = bounded(at_least=1)
    seed: int = bounded(at_least=0, at_most=2**63 - 1)
    device: str = MISSING
    model: dict[str, Any] = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    label_smoothing: float = bounded(at_least=0, below=1)
    ema_decay: float | None = bounded(above=0, below=1)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    max_minutes: float | None = bounded(at_least=0)
    resume: str | None = MISSING
    repeats: int = bounded(at_least=1)
    repeat: int = bounded(at_least=1)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    profile: bool = MISSING


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


def plain(config: Config) -> dict[str, Any]:
    """The configuration as JSON knows it."""
    as_json: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return as_json


def resolved(composed: DictConfig) -> dict[str, Any]:
    """A configuration as plain values; with its interpolations as they are, if one of them cannot be resolved."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(composed, enum_to_str=True)
    return values  # type: ignore[return-value]


def trainer_label(values: Mapping[str, Any]) -> str:
    """How one speaks of a trainer: by its member of the group, and what was changed of it: `plain, fused=true`."""
    changes: dict[str, list[str]] = {}
    for file in sorted((CONF / "trainer").glob("*.yaml")):
        member = OmegaConf.to_container(OmegaConf.load(file))
        changes[file.stem] = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in values.items()
            if value != member.get(key)  # type: ignore[union-attr]
        ]
    name = min(changes, key=lambda member: len(changes[member]))
    return ", ".join([name, *changes[name]])


def is_under(key: str, places: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or stands below one."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by their full keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def run_label(overrides: Sequence[str] | ListConfig) -> str:
    """A folder name from a job's overrides: `["data/loader=ram", "batch_size=300"]` gives `ram-bs300`."""
    if isinstance(overrides, ListConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]  # as typed, interpolations too
    parts = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        group = "/" in name or name in ("model", "optimizer", "schedule", "trainer", "experiment", "hparams")
        short = "bs" if name == "batch_size" else name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in UNNAMED:
            parts.append(value if group and "@" not in name else f"{short}{value}")
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))[:80] or "defaults"


def register_schema() -> None:
    """Make the schema and the resolvers of `conf/config.yaml` known to Hydra."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    OmegaConf.register_new_resolver("run_label", run_label, replace=True)
    # Two runs may start in the same second, in two containers with the same process id.
    OmegaConf.register_new_resolver("run_token", lambda: secrets.token_hex(3), use_cache=True, replace=True)


register_schema()
