"""How much configurations differ, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

NEGLIGIBLE = 1.01  # factors closer to 1 than this are not called a difference
ERROR = 0.05  # probability that a table names a false difference, or that an interval misses the true value
MIN_ROUNDS = 3  # two rounds, or seeds, do not tell noise from a difference


@dataclass(frozen=True)
class Spread:
    """Median and range of the values of `n` runs."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarise values. None if there are none."""
        return cls(median(values), min(values), max(values), len(values)) if values else None

    def __str__(self) -> str:
        return "single run" if self.n == 1 else f"range {seconds(self.low)}–{seconds(self.high)}, n={self.n}"


@dataclass(frozen=True)
class Difference:
    """The value of one configuration less that of another.

    Args:
        mean: over the blocks that both have.
        blocks: number of these.
        low, high: simultaneous 95% interval; None with fewer than three blocks.
    """

    mean: float
    blocks: int
    low: float | None
    high: float | None


class Ratio(Difference):
    """How many times as long one configuration takes as another: a difference of log times, as factors.

    The blocks are rounds, and the mean is geometric.
    """

    @property
    def is_difference(self) -> bool:
        """Whether the interval lies outside 0.99 to 1.01."""
        return self.low is not None and self.high is not None and max(self.low, 1 / self.high) > NEGLIGIBLE

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.2f} ({'single round' if self.blocks == 1 else f'{self.blocks} rounds'})"
        remark = "" if self.is_difference else ", not distinguishable"
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f}{remark})"


class Differences(Generic[T]):
    """The difference of each pair of configurations that have a block in common: a round, or a seed.

    A two-way analysis: configurations are treatments, in blocks. Each pair is compared over its common blocks, with
    Tukey's studentised range for all pairs (Montgomery, Design and Analysis of Experiments, 2017, 3.5 and 4.1). The
    variance of a configuration is estimated from its differences from the others (Grubbs, JASA 43, 1948), and is at
    least the pooled one: a noisy configuration widens its own intervals. `scipy.stats.tukey_hsd` knows no blocks.

    Args:
        values: by block, for each configuration.
    """

    def __init__(self, values: Mapping[T, Mapping[Any, float]]) -> None:
        blocks = dict.fromkeys(key for by_block in values.values() for key in by_block)
        table = np.array([[by_block.get(key, math.nan) for key in blocks] for by_block in values.values()])
        table = table.reshape(len(values), len(blocks))  # also without any
        pairs = table[:, None] - table[None]  # [configuration, configuration, block]
        common = np.isfinite(pairs)
        self._index = {name: number for number, name in enumerate(values)}
        self._counts = common.sum(-1)
        self._means = np.where(common, pairs, 0).sum(-1) / np.maximum(self._counts, 1)
        squares = (np.where(common, pairs - self._means[..., None], 0) ** 2).sum(-1)
        self._margins = _margins(np.isfinite(table), squares, self._counts)

    @classmethod
    def of_logarithms(cls, times: Mapping[T, Mapping[Any, float]]) -> Differences[T]:
        """Those of the logarithms of times, which `ratio` turns into factors."""
        return cls(
            {name: {key: math.log(time) for key, time in row.items() if time > 0} for name, row in times.items()}
        )

    def get(self, first: T, second: T) -> Difference | None:
        """The difference of two configurations; None if they are the same, unknown, or have no common block."""
        if first is second or first not in self._index or second not in self._index:
            return None
        pair = self._index[first], self._index[second]
        mean, margin, count = float(self._means[pair]), float(self._margins[pair]), int(self._counts[pair])
        interval = (mean - margin, mean + margin) if math.isfinite(margin) else (None, None)
        return Difference(mean, count, *interval) if count else None

    def ratio(self, first: T, second: T) -> Ratio | None:
        """As `get`, of logarithms."""
        if not (logs := self.get(first, second)):
            return None
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return Ratio(math.exp(logs.mean), logs.blocks, low, high)


def _margins(present: np.ndarray, squares: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Half the widths of the simultaneous intervals of the mean differences; infinite with too few blocks.

    Args:
        present: whether a configuration (rows) has a value in a block.
        squares: of each pair, squared deviations of the differences from their mean, summed.
        counts: of each pair, common blocks.
    """
    number, freedoms = len(present), np.maximum(counts - 1, 0)
    np.fill_diagonal(freedoms, 0)
    if not (freedoms >= MIN_ROUNDS - 1).any():
        return np.full(counts.shape, math.inf)
    pooled = squares.sum() / freedoms.sum() / 2  # a difference has the variances of both
    variances = np.full(number, pooled)
    if number > 2:
        of_differences = squares.sum(1) / np.maximum(freedoms.sum(1), 1)
        variances = np.maximum(((number - 1) * of_differences - number * pooled) / (number - 2), pooled)
    rows, columns = np.nonzero(present)
    design = np.concatenate([np.eye(number)[rows], np.eye(present.shape[1])[columns]], axis=1)
    freedom = len(rows) - int(np.linalg.matrix_rank(design))
    errors = np.sqrt((variances[:, None] + variances) / 2 / np.maximum(counts, 1))
    return np.where(counts >= MIN_ROUNDS, _studentized_range(number, freedom) * errors, math.inf)


@lru_cache
def _studentized_range(number: int, freedom: int) -> float:
    from scipy.stats import studentized_range  # takes half a second

    return float(studentized_range.ppf(1 - ERROR, number, freedom))


def seconds(value: float) -> str:
    """Three significant digits, but never finer than a millisecond."""
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:.{3 - min(3, len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"
