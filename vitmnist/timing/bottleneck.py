"""What limits a training loop: the loader or the step. Does not import torch."""

from __future__ import annotations

from enum import Enum

from vitmnist.runtime.cpu import Cores

COMPUTE_BOUND_PCT = 10.0  # Below this share of waiting, the step is the limit
INPUT_BOUND_PCT = 60.0  # Above this share of waiting, the loader is the limit
FEW_STEPS = 20  # With fewer steps there is no verdict


class Bottleneck(str, Enum):
    """What limits a loop, or why that is not known."""

    INPUT = "input-bound"
    BALANCED = "balanced"
    COMPUTE = "compute-bound"
    CORES_COMPETE = "little waiting, but loading may take cores from the step"
    TOO_FEW_STEPS = "no verdict"

    @classmethod
    def of(cls, waiting_pct: float, steps: int, cores_compete: bool = False) -> Bottleneck:
        """The limit of a loop that spends this percentage of its time waiting for batches.

        Args:
            cores_compete: loading may slow down the step without making it wait.
        """
        if steps < FEW_STEPS:
            return cls.TOO_FEW_STEPS
        if waiting_pct < COMPUTE_BOUND_PCT:
            return cls.CORES_COMPETE if cores_compete else cls.COMPUTE
        return cls.INPUT if waiting_pct > INPUT_BOUND_PCT else cls.BALANCED


def format_bottleneck(bottleneck: Bottleneck, waiting_pct: float, steps: int, cores: Cores | None) -> str:
    """One sentence, without a bound of the gain: the time of the step without loading is not known."""
    waiting = f"{waiting_pct:.0f}% of the time is spent waiting for data" + (f", with {cores}" if cores else "")
    if bottleneck is Bottleneck.TOO_FEW_STEPS:
        return format_few_steps(steps)
    if bottleneck is Bottleneck.CORES_COMPETE:
        return f"{waiting}; whether loading slows down the step is not measured"
    return f"{bottleneck.value}: {waiting}"


def format_few_steps(steps: int) -> str:
    """The sentence in place of a verdict."""
    return f"no verdict: it needs {FEW_STEPS} steps, and only {steps} {'was' if steps == 1 else 'were'} measured"


def format_ms(seconds: float) -> str:
    """A time with the digits that matter: `0.02 ms`, `5.3 ms`, `1,207 ms`."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


def format_s(seconds: float) -> str:
    """A time with the digits that matter: `0.03 s`, `4.4 s`, `1,207 s`."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
