"""The types and bounds of every configuration key that belongs to no registered option, and what the key affects.

Hydra composes `conf/*.yaml` over `Config`. The options of a registered model, loader, optimizer, … are a dataclass next
to its code. This module does not import torch, so `--help` answers at once.

The metadata of a field describe its key, or all keys of its section:

affects      result (the default), timing, or nothing; the report compares runs by what affects either
may_change   whether a resumed run may have another value; by default only what does not affect the result may
registry     where the members of a config group are registered, as `module:NAME`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pkgutil import resolve_name
from typing import Any

from omegaconf import MISSING

from vitmnist.config.validation import bounded, config_field, group, join, or_auto, section


class Shuffle(str, Enum):
    """The order of the samples in an epoch; see `vitmnist.data.sampler`."""

    sample = "sample"
    batch = "batch"
    none = "none"


@dataclass
class DataConfig:
    """`data`: dataset, order, loader and augmentation."""

    root: str = config_field(affects="nothing")
    shuffle: Shuffle = MISSING
    holdout: int | float | None = bounded(above=0)
    holdout_seed: int = bounded(at_least=0, at_most=2**63 - 1)
    drop_last: bool = MISSING
    normalize: Any = MISSING
    dataset: dict[str, Any] = group("vitmnist.data.datasets.base:DATASETS")
    loader: dict[str, Any] = group("vitmnist.loaders.base:LOADERS", affects="timing")
    augment: dict[str, Any] = MISSING


class Precision(str, Enum):
    """The precision of matrix products; see `vitmnist.training.step`."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class TrainerConfig:
    """`trainer`: how a step is computed. Apart from `clip_norm`, changes the result by rounding only."""

    micro_batch: int | str | None = or_auto(at_least=1, affects="timing")
    compile: bool | str = or_auto(affects="timing")
    precision: Precision = config_field(affects="timing")
    fused: bool | str = or_auto(affects="timing")
    deterministic: bool | str = or_auto(affects="timing")
    clip_norm: float | None = bounded(above=0)
    name: str = config_field(affects="timing")


@dataclass
class CheckpointConfig:
    """`checkpoint`: how often a run is saved, in addition to its end and a stop."""

    min_interval_s: float | None = bounded(at_least=0)
    every_minutes: float | None = bounded(above=0)


@dataclass
class LogConfig:
    """`log`: how often step metrics and images are logged."""

    every_steps: int | None = bounded(at_least=1)
    images_every_epochs: int | None = bounded(at_least=1)


@dataclass
class DistributedConfig:
    """`distributed`: training with several processes under `torchrun`."""

    timeout_s: float = bounded(above=0, at_most=1e6)


@dataclass
class SweepConfig:
    """`sweep`: what a hyperparameter search optimises."""

    objective: str | None = config_field()


@dataclass
class Config:
    """The whole configuration. Defaults and the meaning of each key are in `conf/`."""

    batch_size: int = bounded(at_least=1)
    epochs: int = bounded(at_least=1, may_change=True)
    seed: int = bounded(at_least=0, at_most=2**63 - 1)
    device: str = config_field(affects="timing")
    model: dict[str, Any] = group("vitmnist.models:MODELS")
    init: str | None = MISSING
    init_skip: list[str] = MISSING
    lr_scale: dict[str, float] = section(dict, at_least=0)
    data: DataConfig = section(DataConfig)
    loss: dict[str, Any] = group("vitmnist.losses:LOSSES")
    optimizer: dict[str, Any] = group("vitmnist.optim.optimizers:OPTIMIZERS")
    schedule: dict[str, Any] = group("vitmnist.optim.schedules:SCHEDULES")
    trainer: TrainerConfig = section(TrainerConfig)
    monitor: str = config_field(may_change=True)
    patience: int | None = bounded(at_least=1, may_change=True)
    ema_decay: float | None = bounded(above=0, below=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig, affects="nothing")
    distributed: DistributedConfig = section(DistributedConfig, affects="nothing")
    max_minutes: float | None = bounded(at_least=0, affects="nothing")
    resume: str | None = config_field(affects="nothing")
    repeats: int = bounded(at_least=1, affects="nothing")
    repeat: int = bounded(at_least=1, affects="nothing")
    sweep: SweepConfig = section(SweepConfig, affects="nothing")
    logger: Any = config_field(affects="nothing")  # a list; a name alone becomes a list of one
    log: LogConfig = section(LogConfig, affects="nothing")

    def __post_init__(self) -> None:
        self.logger = self.logger if isinstance(self.logger, list) else [self.logger]


def may_change(metadata: Mapping[str, Any]) -> bool:
    """Whether a resumed run may have another value of a key."""
    return bool(metadata.get("may_change", metadata.get("affects", "result") != "result"))


def affects_nothing(metadata: Mapping[str, Any]) -> bool:
    """Whether a key affects neither the result nor the timing."""
    return metadata.get("affects") == "nothing"


def keys_where(
    holds: Callable[[Mapping[str, Any]], bool],
    values: Mapping[str, Any] | None = None,
    schema: type = Config,
    prefix: str = "",
) -> list[str]:
    """The keys, and sections of keys, whose metadata satisfy a condition.

    Args:
        values: a configuration; the options of the members that it chooses are looked at too.
    """
    keys = []
    for item in fields(schema):
        key, section, chosen = join(prefix, item.name), item.default_factory, (values or {}).get(item.name)
        if holds(item.metadata):
            keys.append(key)
        elif is_dataclass(section):
            keys += keys_where(holds, chosen, section, key)
        elif "registry" in item.metadata and chosen:
            _, options = resolve_name(item.metadata["registry"]).member(chosen, key)
            keys += keys_where(holds, None, type(options), key)
    return keys


def registries(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The key of each config group, and its registry."""
    for item in fields(schema):
        key = join(prefix, item.name)
        if is_dataclass(item.default_factory):
            yield from registries(item.default_factory, key)
        elif "registry" in item.metadata:
            yield key, resolve_name(item.metadata["registry"])
