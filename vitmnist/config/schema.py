"""The schema of the configuration: the type and bounds of each key, and what the key affects.

Hydra composes `conf/*.yaml` over `Config`. The options of a registered member, such as a model or a loader, are a
dataclass next to its code. This module does not import torch, so that `--help` answers at once.

Give a new key a default only if it reproduces the old behaviour, because the default completes older records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vitmnist.config.validation import KeyMetadata, config_field, get_metadata, join_key, section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Shuffle(str, Enum):
    """The order of the samples in an epoch; see `vitmnist.data.sampler`."""

    sample = "sample"
    batch = "batch"
    none = "none"
    balanced = "balanced"


@dataclass
class DataConfig:
    """`data`: dataset, order, loader and augmentation."""

    root: str = config_field(affects="nothing")
    shuffle: Shuffle = MISSING
    holdout: int | float | None = config_field(above=0, image_selection="splits")
    holdout_seed: int = config_field(at_least=0, at_most=2**63 - 1, image_selection="seed")
    folds: int | None = config_field(None, at_least=2, image_selection="splits")
    fold: int | None = config_field(None, at_least=0, image_selection="splits")
    drop_last: bool = MISSING
    normalize: Any = MISSING
    crop_size: Any = config_field(None, at_least=1)
    dataset: dict[str, Any] = config_field(registry="vitmnist.data.datasets.base:DATASETS")
    loader: dict[str, Any] = config_field(registry="vitmnist.loaders.base:LOADERS", affects="time_and_rounding")
    augment: dict[str, Any] = MISSING


class Precision(str, Enum):
    """The precision of matrix products; see `vitmnist.training.step_options`."""

    auto = "auto"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class TrainerConfig:
    """`trainer`: how a step is computed. All keys but `clip_norm` change the result by rounding only.

    With batch normalisation, `micro_batch` changes it too: the statistics come from a microbatch.
    """

    micro_batch: int | str | None = config_field(at_least=1, allows_auto=True, affects="time_and_rounding")
    compile: bool | str = config_field(allows_auto=True, affects="time_and_rounding")
    precision: Precision = config_field(affects="time_and_rounding")
    fused: bool | str = config_field(allows_auto=True, affects="time_and_rounding")
    graph: bool | str = config_field(allows_auto=True, affects="time_and_rounding")
    deterministic: bool | str = config_field(allows_auto=True, affects="time_and_rounding")
    clip_norm: float | None = config_field(above=0)
    name: str = config_field(affects="time_and_rounding")


@dataclass
class CheckpointConfig:
    """`checkpoint`: how often a run is saved, in addition to its end and a stop."""

    min_interval_s: float | None = config_field(at_least=0, affects="time_and_rounding")
    every_minutes: float | None = config_field(above=0, affects="time_and_rounding")


@dataclass
class LogConfig:
    """`log`: how often step metrics and images are logged."""

    every_steps: int | None = config_field(at_least=1, affects="time_and_rounding")
    images_every_epochs: int | None = config_field(at_least=1, affects="nothing")
    per_class: bool = config_field(False, affects="nothing")


@dataclass
class DistributedConfig:
    """`distributed`: training with several processes under `torchrun`."""

    timeout_s: float = config_field(above=0, at_most=1e6, affects="nothing")


@dataclass
class Config:
    """The whole configuration; `conf/` has the defaults and explains each key."""

    name: str | None = config_field(None, affects="nothing")
    tags: list[str] | None = config_field(None, affects="nothing")
    notes: str | None = config_field(None, affects="nothing")
    batch_size: int = config_field(at_least=1)
    epochs: int = config_field(at_least=1, may_change_on_resume=True)
    limit_batches: int | None = config_field(None, at_least=1)
    seed: int = config_field(at_least=0, at_most=2**63 - 1)
    device: str = config_field(affects="time_and_rounding")
    model: dict[str, Any] = config_field(registry="vitmnist.models:MODELS")
    init: str | None = MISSING
    init_skip: list[str] = MISSING
    lr_scale: dict[str, float] = section(dict, at_least=0, has_free_keys=True)
    data: DataConfig = section(DataConfig)
    loss: dict[str, Any] = config_field(registry="vitmnist.losses:LOSSES")
    optimizer: dict[str, Any] = config_field(registry="vitmnist.optim.optimizers:OPTIMIZERS")
    schedule: dict[str, Any] = config_field(registry="vitmnist.optim.schedules:SCHEDULES")
    trainer: TrainerConfig = section(TrainerConfig)
    metrics: list[Any] | None = None
    monitor: str = config_field()
    patience: int | None = config_field(at_least=1, may_change_on_resume=True)
    ema_decay: float | None = config_field(above=0, below=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    distributed: DistributedConfig = section(DistributedConfig)
    max_minutes: float | None = config_field(at_least=0, affects="nothing")
    resume: str | None = config_field(affects="nothing")
    repeats: int = config_field(at_least=1, affects="nothing")
    repeat: int = config_field(at_least=1, affects="nothing")
    logger: Any = config_field(affects="nothing")
    log: LogConfig = section(LogConfig)

    def __post_init__(self) -> None:
        # A single logger can be given by its name alone.
        self.logger = self.logger if isinstance(self.logger, list) else [self.logger]

    @property
    def epochs_to_train(self) -> int:
        """The epochs after which the run is completed; schedules depend on `epochs` alone."""
        return 1 if self.limit_batches else self.epochs


def iterate_metadata(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, KeyMetadata]]:
    """Yield each key with its metadata; a section comes before its keys."""
    for option in fields(schema):
        key = join_key(prefix, option.name)
        yield key, get_metadata(option)
        if is_dataclass(option.default_factory):
            yield from iterate_metadata(option.default_factory, key)


FREE_KEYS = [key for key, metadata in iterate_metadata() if metadata.has_free_keys]
"""The keys of dicts that are values, not sections."""
IGNORED_KEYS = [key for key, metadata in iterate_metadata() if metadata.affects == "nothing"]
"""The keys that affect neither the result nor the time, so that comparisons ignore them."""


def iterate_registries() -> Iterator[tuple[str, Any]]:
    """Yield the key of each config group and its `ConfigGroup`, which this module cannot import from a layer above."""
    for key, metadata in iterate_metadata():
        if metadata.registry:
            yield key, resolve_name(metadata.registry)


def find_changeable_keys(config: Config) -> list[str]:
    """List the keys and sections that a resumed run may change, including the options of its members."""
    keys = [*iterate_metadata()]
    for group, registry in iterate_registries():
        _, options = registry.resolve(attrgetter(group)(config))
        keys += iterate_metadata(type(options), group)
    return [key for key, metadata in keys if metadata.may_change_on_resume or metadata.affects != "result"]


def to_json_values(config: DataclassInstance) -> dict[str, Any]:
    """Convert a configuration dataclass to JSON values."""
    return dict(json.loads(json.dumps(asdict(config))))


def flatten_keys(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration: the values by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE_KEYS:
            flat |= flatten_keys(value, f"{key}.")
        else:
            flat[key] = str(value) if key in FREE_KEYS else value  # As text, dicts of another order differ.
    return flat


def fill_defaults(recorded: Mapping[str, Any], schema: type[DataclassInstance] = Config) -> dict[str, Any]:
    """Add the defaults of keys and options that are newer than the record, after the recorded keys, as JSON values."""
    values = dict(recorded)
    for option in fields(schema):
        value = values.get(option.name)
        if is_dataclass(option.default_factory) and isinstance(value, Mapping):
            values[option.name] = fill_defaults(value, option.default_factory)
        elif (registry := get_metadata(option).registry) and isinstance(value, Mapping):
            values[option.name] = {**value, **resolve_name(registry).with_defaults(value)}
        elif option.name not in values and option.default not in (NO_DEFAULT, MISSING):
            values[option.name] = option.default
    return dict(json.loads(json.dumps(values, default=str)))
