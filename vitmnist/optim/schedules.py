"""The learning-rate schedules: the factor of the learning rate in each training step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError
from vitmnist.registry import ConfigGroup


@dataclass
class ScheduleOptions:
    """Base class of the options of a schedule."""

    follows_monitor: ClassVar[bool] = False
    """Whether the factor depends on `ScheduleState.monitored`, which is empty otherwise; needs a validation split."""


@dataclass(frozen=True)
class ScheduleState:
    """All that a schedule may depend on besides its options, so that a resumed run can have more epochs.

    Args:
        global_step: the training step, counted from 0 over all epochs of the run.
        total_steps: the number of steps of the run.
        steps_per_epoch: the number of steps of an epoch.
        monitored: the value of `monitor` after each completed epoch: higher is better, and None was not measured.
    """

    global_step: int
    total_steps: int
    steps_per_epoch: int
    monitored: Sequence[float | None]


SCHEDULES = ConfigGroup[ScheduleOptions, [ScheduleState], float]("schedule", __package__, ScheduleOptions)
"""Functions of (options, state) that return the factor of the learning rate."""


def build_schedule(
    schedule_config: Mapping[str, Any],
    epochs: int,
    steps_per_epoch: int,
    get_history: Callable[[], Sequence[float | None]] = list,
) -> Callable[[int], float]:
    """Return a function from a global step to the learning-rate factor; raises `ConfigError` if the options do not fit.

    `get_history` returns the value of `monitor` after each epoch so far.
    """
    compute_factor, options = SCHEDULES.resolve(schedule_config, complete=True)
    total_steps = epochs * steps_per_epoch

    def factor(global_step: int) -> float:
        # `data/loader=auto` can time more steps than the run has. They use the last factor.
        global_step = min(global_step, total_steps - 1)
        # Reading 100 records takes 30 µs, which other schedules need not spend in each step.
        monitored = get_history()[: global_step // steps_per_epoch] if options.follows_monitor else ()
        return float(compute_factor(options, ScheduleState(global_step, total_steps, steps_per_epoch, monitored)))

    factor(0)  # Raise now if the options do not fit.
    return factor


@dataclass
class OneCycleOptions(ScheduleOptions):
    """See `conf/schedule/one_cycle.yaml`."""

    warmup: float = config_field(0.3, above=0, below=1)
    start_factor: float = config_field(0.04, above=0, at_most=1)
    end_factor: float = config_field(1e-4, above=0, at_most=1)


@dataclass
class CosineOptions(ScheduleOptions):
    """See `conf/schedule/cosine.yaml`."""

    warmup_epochs: float = config_field(0.0, at_least=0)
    final_factor: float = config_field(0.0, at_least=0, at_most=1)


@dataclass
class StepDecayOptions(ScheduleOptions):
    """See `conf/schedule/step.yaml`."""

    every_epochs: float = config_field(10.0, above=0)
    at_epochs: list[float] | None = config_field(None, above=0)
    factor: float = config_field(0.1, above=0, at_most=1)


@dataclass
class PlateauOptions(ScheduleOptions):
    """See `conf/schedule/plateau.yaml`."""

    factor: float = config_field(0.1, above=0, below=1)
    patience: int = config_field(5, at_least=1)
    min_factor: float = config_field(0.0, at_least=0, at_most=1)
    follows_monitor: ClassVar[bool] = True


@SCHEDULES.register("constant")
def constant(options: ScheduleOptions, state: ScheduleState) -> float:
    """Constant learning rate, as in the articles."""
    return 1.0


@SCHEDULES.register("cosine", CosineOptions)
def cosine(options: CosineOptions, state: ScheduleState) -> float:
    """Linear warm-up and cosine decay (Loshchilov, Hutter, arXiv:1608.03983; Goyal et al., arXiv:1706.02677).

    As in torch's `CosineAnnealingLR` with `T_max` steps of decay, the curve would reach `final_factor` one step after
    the last step, so that no step has a learning rate of 0.

    Raises:
        ConfigError: no step is left for the decay.
    """
    warmup = options.warmup_epochs * state.steps_per_epoch
    if warmup >= state.total_steps:
        epochs = state.total_steps // state.steps_per_epoch
        raise ConfigError(f"schedule.warmup_epochs={options.warmup_epochs:g}: must be below epochs={epochs}")
    if state.global_step < warmup:
        return (state.global_step + 1) / (warmup + 1)  # A first step at 0 would train nothing.
    return _cosine(1.0, options.final_factor, (state.global_step - warmup) / (state.total_steps - warmup))


@SCHEDULES.register("one_cycle", OneCycleOptions)
def one_cycle(options: OneCycleOptions, state: ScheduleState) -> float:
    """Cosine warm-up to the optimizer's learning rate and cosine decay (Smith, Topin, arXiv:1708.07120).

    The curve would reach `end_factor` one step after the last step. torch's `OneCycleLR` reaches it in the last step,
    and divides by zero if the warm-up is a single step.
    """
    warmup = options.warmup * state.total_steps
    if state.global_step < warmup:
        return _cosine(options.start_factor, 1.0, state.global_step / warmup)
    return _cosine(1.0, options.end_factor, (state.global_step - warmup) / (state.total_steps - warmup))


@SCHEDULES.register("step", StepDecayOptions)
def step_decay(options: StepDecayOptions, state: ScheduleState) -> float:
    """Multiply the learning rate by a factor after some epochs, as torch's `StepLR` and `MultiStepLR` do."""
    # 1.1 epochs of 100 steps are 110.00000000000001 steps; without rounding, the factor would change a step late.
    epoch = round(state.global_step / state.steps_per_epoch, 9)
    if options.at_epochs is None:
        return float(options.factor ** math.floor(round(epoch / options.every_epochs, 9)))
    return float(options.factor ** sum(epoch >= start for start in options.at_epochs))


@SCHEDULES.register("plateau", PlateauOptions)
def plateau(options: PlateauOptions, state: ScheduleState) -> float:
    """Multiply the learning rate by a factor after each `patience` epochs in a row without a new best.

    As torch's `ReduceLROnPlateau`, without a threshold and with its `patience` plus 1. A missing value is no new best.
    """
    factor, best, waited = 1.0, -math.inf, 0
    for value in state.monitored:
        waited += 1
        if value is not None and value > best:
            best, waited = value, 0
        elif waited == options.patience:
            factor, waited = factor * options.factor, 0
    return max(factor, options.min_factor)


def _cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2
