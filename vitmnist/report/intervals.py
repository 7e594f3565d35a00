"""Distribution-free intervals between order statistics, and estimates with them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist, geometric_mean, median, median_high, median_low

NEGLIGIBLE = 1.01  # factors closer to 1 than this are not called a difference
ERROR = 0.05  # probability that an interval misses, or that a report names a false difference, is at most this


@dataclass(frozen=True)
class Interval:
    """An interval, and the probability that it contains the true median."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], error: float = ERROR) -> Interval | None:
    """The shortest symmetric interval between order statistics that misses the true median with at most `error`.

    Conover, Practical Nonparametric Statistics, 1999, 3.2. None if there are too few values: fewer than 6 for 0.05.
    """
    count = len(values)
    # The interval from the k-th smallest to the k-th largest misses if fewer than k values are on one side.
    misses = [2 * ways / 2**count for ways in accumulate(math.comb(count, k) for k in range(count // 2))]
    rank = bisect_right(misses, error)
    if not rank:
        return None
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank], 1 - misses[rank - 1])


def required_rounds(error: float) -> int:
    """The smallest number of values for which `median_interval` gives an interval."""
    return 1 + math.ceil(-math.log2(error))


def wilson(share: float, count: int) -> tuple[float, float]:
    """95% interval of a binomial proportion (Wilson, 1927, doi:10.1080/01621459.1927.10502953)."""
    z = NormalDist().inv_cdf(1 - ERROR / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True)
class Spread:
    """Median and range of the values of `n` runs; the interval is None if there are too few rounds."""

    median: float
    low: float
    high: float
    n: int
    interval: Interval | None

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Spread | None:
        """Summarise the values of each round. None if there are none.

        The interval is over one value per round: runs of the same round share the state of the machine.
        """
        values = [value for one in rounds for value in one]
        if not values:
            return None
        interval = median_interval([median(one) for one in rounds if one])
        return cls(median(values), min(values), max(values), len(values), interval)

    def __str__(self) -> str:
        if self.n == 1:
            return "single run"
        kind, low, high = "range", self.low, self.high
        if self.interval:
            kind, low, high = (
                f"{min(100 * self.interval.coverage, 99.9):.1f}% interval",
                self.interval.low,
                self.interval.high,
            )
        return f"{kind} {seconds(low)}–{seconds(high)}, n={self.n}"


@dataclass(frozen=True)
class PairedRatio:
    """How many times as long one configuration takes as another: the median over the rounds that both have."""

    ratio: float
    rounds: int
    interval: Interval | None
    is_difference: bool

    @classmethod
    def of(cls, ratios: Sequence[float], error: float = ERROR) -> PairedRatio:
        """Summarise the ratios of the rounds, at least one."""
        # With an even number of rounds, the geometric mean makes the ratio of A to B the inverse of that of B to A.
        ratio = geometric_mean((median_low(ratios), median_high(ratios)))
        interval = median_interval(ratios, error)
        is_difference = interval is not None and (interval.low > NEGLIGIBLE or interval.high < 1 / NEGLIGIBLE)
        return cls(ratio, len(ratios), interval, is_difference)

    def __str__(self) -> str:
        if self.interval:
            remark = "" if self.is_difference else ", not distinguishable"
            return f"{self.ratio:.2f} ({self.interval.low:.2f}–{self.interval.high:.2f}{remark})"
        return f"{self.ratio:.2f} ({'single round' if self.rounds == 1 else f'{self.rounds} rounds'}, too few to tell)"


def seconds(value: float) -> str:
    """Three significant digits, but never finer than a millisecond."""
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:.{3 - min(3, len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"
