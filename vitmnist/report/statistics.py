"""Estimates how much configurations differ, and how certain that is."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Generic, TypeVar

from vitmnist.timing.table import Spread, format_seconds

T = TypeVar("T", bound=Hashable)

NEGLIGIBLE_RATIO = 1.01
"""Ratios up to this value, and reciprocals of such ratios, do not count as differences."""
ERROR_RATE = 0.05
"""The family-wise error rate: the probability that at least one interval of a table misses its true value."""
MIN_ROUNDS = 3
"""With fewer rounds or seeds in common, two configurations are not compared."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """An estimate of how much two configurations differ, with its simultaneous 95% interval.

    `mean` is the mean difference, or geometric mean ratio, over the rounds or seeds that both configurations have.
    """

    mean: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval of a ratio lies outside 0.99 to 1.01."""
        return max(self.low, 1 / self.high) > NEGLIGIBLE_RATIO

    def __str__(self) -> str:
        return f"{self.mean:.2f} times as long (95% interval {self.low:.2f}–{self.high:.2f})"


class PairwiseComparison(Generic[T]):
    """The differences of all pairs of configurations, over the rounds or seeds that both have.

    Paired t-intervals with Bonferroni correction. Three rounds give a poor estimate of the variance, so it is pooled
    over the pairs sharing a configuration, or over all pairs if that is larger. A noisy configuration thus widens its
    own intervals. `as_ratios` compares the logarithms of the values, and returns ratios.
    """

    def __init__(self, values: Mapping[T, Mapping[str, float]], as_ratios: bool = False) -> None:
        transform: Callable[[float], float] = math.log if as_ratios else float
        self._inverse: Callable[[float], float] = math.exp if as_ratios else float
        self._values: dict[T, dict[str, float]] = {}
        for configuration, by_round in values.items():
            self._values[configuration] = {name: transform(value) for name, value in by_round.items()}
        # Over the pairs with each configuration, and over all pairs (key None).
        sums_of_squares: dict[T | None, float] = defaultdict(float)
        degrees_of_freedom: dict[T | None, int] = defaultdict(int)
        repeated = [configuration for configuration, by_round in values.items() if len(by_round) >= MIN_ROUNDS]
        pairs = [pair for pair in combinations(repeated, 2) if len(self._deltas(*pair)) >= MIN_ROUNDS]
        for pair in pairs:
            deltas = self._deltas(*pair)
            mean = fmean(deltas)
            squares = sum((delta - mean) ** 2 for delta in deltas)  # `statistics.variance` takes 50 times as long.
            for name in (*pair, None):
                sums_of_squares[name] += squares
                degrees_of_freedom[name] += len(deltas) - 1
        self._variances = {name: sums_of_squares[name] / degrees for name, degrees in degrees_of_freedom.items()}
        self._level = 1 - ERROR_RATE / 2 / max(len(pairs), 1)
        # The residual degrees of freedom of a two-way layout, configurations by rounds. Satterthwaite's approximation
        # (Biometrics Bulletin 2, 1946) lowers them if a few configurations are much noisier than the others.
        compared = {configuration for pair in pairs for configuration in pair}
        rounds = [name for configuration in compared for name in values[configuration]]
        variances = [self._variances[name] for name in compared]
        self._residual_degrees_of_freedom = float(len(rounds) - len(set(rounds)) - len(compared) + 1)
        if any(variances):
            self._residual_degrees_of_freedom *= fmean(variances) ** 2 / fmean(variance**2 for variance in variances)

    def compare(self, first: T, second: T) -> ConfidenceInterval | None:
        """Compare two configurations; None if they are the same, or have too few rounds or seeds in common."""
        deltas = self._deltas(first, second)
        count = len(deltas)
        if first == second or count < MIN_ROUNDS:
            return None
        from scipy.special import stdtrit  # Import late: only a report with three rounds needs it.

        pooled_variance = max(self._variances[name] for name in (first, second, None))
        quantile = stdtrit(max(self._residual_degrees_of_freedom, count - 1), self._level)
        mean = fmean(deltas)
        margin = quantile * math.sqrt(pooled_variance / count)
        return ConfidenceInterval(self._inverse(mean), self._inverse(mean - margin), self._inverse(mean + margin))

    def _deltas(self, first: T, second: T) -> list[float]:
        minuends, subtrahends = self._values.get(first, {}), self._values.get(second, {})
        return [value - subtrahends[name] for name, value in minuends.items() if name in subtrahends]


def format_range(spread: Spread) -> str:
    return f"{format_seconds(spread.low)}–{format_seconds(spread.high)}, n={spread.n}"
