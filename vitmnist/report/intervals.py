"""Intervals between order statistics: they hold for any distribution of the times of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median

NEGLIGIBLE = 1.01  # the least factor that is called a difference
ERROR = 0.05  # the largest rate at which an interval misses, or a report names a difference that is none


@dataclass(frozen=True)
class Interval:
    """`coverage` is the probability that the interval contains the true median."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Spread:
    """Median and range of the figures of `n` runs; `confidence_interval` is None if the rounds are too few."""

    median: float
    low: float
    high: float
    n: int
    confidence_interval: Interval | None

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Spread | None:
        """Of the figures of runs by round; None where nothing was measured.

        The interval is over one value per round: runs of the same round share what the machine did meanwhile.
        """
        values = [value for figures in rounds for value in figures]
        if not values:
            return None
        interval = median_interval([median(figures) for figures in rounds if figures])
        return cls(median(values), min(values), max(values), len(values), interval)


@dataclass(frozen=True)
class PairedRatio:
    """How many times as long one configuration takes as another, round by round.

    Args:
        ratio: the median of the ratios of the rounds.
        rounds: how many both have.
        interval: of the true median ratio; None if the rounds are too few for the coverage that was asked for.
    """

    ratio: float
    rounds: int
    interval: Interval | None

    @property
    def is_difference(self) -> bool:
        """Whether the two are shown to differ by more than 1%.

        The order within a round is fixed. A machine that slows down steadily through a sweep therefore shifts every
        ratio the same way, by a small part of its whole slowdown.
        """
        return self.interval is not None and (self.interval.low > NEGLIGIBLE or self.interval.high < 1 / NEGLIGIBLE)

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float], error: float = ERROR) -> PairedRatio | None:
        """The ratios of two sequences of positive times, round by round; None where there is no round."""
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
    """The least number of rounds from which there is an interval."""
    return 1 + math.ceil(-math.log2(error))


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95% interval of a binomial proportion (Wilson, 1927, doi:10.1080/01621459.1927.10502953)."""
    z = NormalDist().inv_cdf(1 - ERROR / 2)
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return max(centre - half, 0.0), min(centre + half, 1.0)
