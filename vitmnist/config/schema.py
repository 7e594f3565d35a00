"""The types and bounds of every configuration key that belongs to no registered option.

Hydra composes `conf/*.yaml` over `Config`. The options of a registered model, loader, optimizer, … are a dataclass next
to its code. This module does not import torch, so `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from vitmnist.config.validation import bounded, or_auto


class Shuffle(str, Enum):
    """The order of the samples in an epoch; see `vitmnist.data.sampler`."""

    sample = "sample"
    batch = "batch"
    none = "none"


NOT_COMPARED = (
    *("checkpoint", "data.root", "distributed", "max_minutes", "repeat", "repeats", "resume", "tensorboard"),
)
"""Keys, and sections of them, that affect neither the result nor the timing."""


@dataclass
class DataConfig:
    """`data`: dataset, order, loader and augmentation."""

    root: str = MISSING
    shuffle: Shuffle = MISSING
    holdout: int | None = bounded(at_least=1)
    drop_last: bool = MISSING
    dataset: dict[str, Any] = MISSING
    loader: dict[str, Any] = MISSING
    augment: dict[str, Any] = MISSING


class Precision(str, Enum):
    """The precision of matrix products; see `vitmnist.training.step`."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class TrainerConfig:
    """`trainer`: how a step is computed. Changes the result by rounding only."""

    micro_batch: int | str | None = or_auto(at_least=1)
    compile: bool | str = or_auto()
    precision: Precision = MISSING
    fused: bool | str = or_auto()


@dataclass
class CheckpointConfig:
    """`checkpoint`: how often a run is saved, in addition to its end and a stop."""

    min_interval_s: float | None = bounded(at_least=0)
    every_minutes: float | None = bounded(above=0)


@dataclass
class TensorBoardConfig:
    """`tensorboard`: how often step metrics and images are written."""

    every_steps: int | None = bounded(at_least=1)
    images_every_epochs: int | None = bounded(at_least=1)


@dataclass
class DistributedConfig:
    """`distributed`: training with several processes under `torchrun`."""

    timeout_s: float = bounded(above=0, at_most=1e6)


@dataclass
class Config:
    """The whole configuration. Defaults and the meaning of each key are in `conf/`."""

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
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    profile: bool = MISSING
