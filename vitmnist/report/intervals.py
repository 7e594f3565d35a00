"""Intervals between order statistics: they hold for any distribution of the times of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median

ERROR = 0.05  # the largest rate at which an interval misses, or a report names a difference that is none


@dataclass(frozen=True)
class Interval:
    """`coverage` is the probability that the interval contains the true median."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Spread:
    """Median and range of the figures of `n` runs; `confidence_interval` is None where the runs are too few for one."""

    median: float
    low: float
    high: float
    n: int
    confidence_interval: Interval | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where nothing was measured."""
        if not values:
            return None
        return cls(median(values), min(values), max(values), len(values), median_interval(values))


@dataclass(frozen=True)
class PairedRatio:
    """How many times as long one configuration takes as another, over runs of the same round.

    Args:
        ratio: the median of the ratios of the pairs.
        interval: of the true median ratio; None where the pairs are too few for the coverage that was asked for.
    """

    ratio: float
    pairs: int
    interval: Interval | None

    @property
    def excludes_one(self) -> bool:
        """Whether the two take different times."""
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float], error: float = ERROR) -> PairedRatio | None:
        """The ratios of two sequences of positive times, pair by pair; None where there is no pair."""
        if not slower:
            return None
        logs = [math.log(one / other) for one, other in zip(slower, faster, strict=True)]
        found = median_interval(logs, error)
        interval = found and Interval(math.exp(found.low), math.exp(found.high), found.coverage)
        return cls(math.exp(median(logs)), len(logs), interval)


def median_interval(values: Sequence[float], error: float = ERROR) -> Interval | None:
    """The shortest interval between order statistics that misses the true median at a rate of at most `error`.

    Conover, Practical Nonparametric Statistics, 1999, 3.2. None where the values are too few: 1 to 5 for 0.05.
    """
    rank, missed = _rank(len(values), error)
    if not rank:
        return None
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank], 1 - missed)


@lru_cache
def _rank(number: int, error: float) -> tuple[int, float]:
    """The largest rank at which an interval of `number` values may begin, and the rate at which it misses."""
    rank, missed, below = 0, 0.0, 0
    while rank < number // 2:
        below += math.comb(number, rank)
        if 2 * below / 2**number > error:
            break
        rank, missed = rank + 1, 2 * below / 2**number
    return rank, missed


def least_runs(error: float) -> int:
    """The least number of runs, or of pairs, from which there is an interval."""
    return 1 + math.ceil(-math.log2(error))


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95% interval of a binomial proportion (Wilson, 1927, doi:10.1080/01621459.1927.10502953)."""
    z = NormalDist().inv_cdf(1 - ERROR / 2)
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return max(centre - half, 0.0), min(centre + half, 1.0)
