"""The schema of the configuration, and the checks that Hydra lacks.

Hydra composes `conf/*.yaml` over `Config`, so that a wrong type is refused before anything starts. The options of a
group with several members (a model, a loader, an optimizer) stand beside the code that reads them, and the member's
registry turns them into its dataclass with `typed`. This file imports no torch: `--help` answers at once.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from vitmnist.config.labels import run_label
from vitmnist.config.validation import bounded, or_auto


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
    """What a search looks for; see `vitmnist.cli.sweep`."""

    eval_acc = "eval_acc"
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


def register_schema() -> None:
    """Make the schema and the resolvers of `conf/config.yaml` known to Hydra."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    OmegaConf.register_new_resolver("run_label", run_label, replace=True)
    # Two runs may start in the same second, in two containers with the same process id.
    OmegaConf.register_new_resolver("run_token", lambda: secrets.token_hex(3), use_cache=True, replace=True)


register_schema()
