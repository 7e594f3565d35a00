"""Which configuration has the highest accuracy, and which others may have it too."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from vitmnist.report.compare import Comparison, Configuration
from vitmnist.report.intervals import least_runs, median_interval, wilson
from vitmnist.report.text import coverage, listed, row_name, where


@dataclass(frozen=True)
class Accuracy:
    """Accuracy after the last epoch, in percent, by seed; of `images` evaluated images, None if unknown."""

    label: str
    by_seed: dict[str, float]
    images: int | None

    @property
    def median(self) -> float:
        """Over the seeds."""
        return median(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """The binomial 95% interval: the same images are evaluated with every seed, so more seeds do not narrow it."""
        if not self.images or self.median > 100:
            return None
        low, high = wilson(self.median / 100, self.images)
        return 100 * low, 100 * high

    def may_equal(self, other: Accuracy) -> bool:
        """Whether the intervals, widened by the range over seeds, meet."""
        (low, high), (other_low, other_high) = self._bounds(), other._bounds()
        return low <= other_high and other_low <= high

    def _bounds(self) -> tuple[float, float]:
        known = [*self.by_seed.values(), *(self.interval or ())]
        return min(known), max(known)


def highest_accuracy(comparison: Comparison) -> str:
    """The highest median accuracy with its uncertainty, and how the others compare with it."""
    found = accuracies(comparison)
    if len(found) < 2:
        return ""
    best, *others = sorted(found, key=lambda one: -one.median)
    tied = [other.label for other in others if other.median == best.median]
    apart, alike, unknown = [], [], []
    for other in others:
        common = best.by_seed.keys() & other.by_seed.keys()
        gain = median_interval([best.by_seed[seed] - other.by_seed[seed] for seed in common], comparison.error)
        if gain and not gain.low <= 0 <= gain.high:
            low, high = sorted((abs(gain.low), abs(gain.high)))
            side = "above" if gain.low > 0 else "below"  # below: on the seeds that both have
            apart.append(f"{side} {other.label} by {low:.2f} to {high:.2f} points ({coverage(gain.coverage)})")
        elif other.label in tied:
            continue
        elif gain or best.may_equal(other):
            alike.append(other.label)
        else:
            unknown.append(other.label)
    labels = " and ".join([best.label, *tied])
    parts = [f"Highest median accuracy: {labels}, {best.median:.2f}% ({_uncertainty(best)})."]
    if apart:
        parts.append(f"With the same seeds it is {listed(apart)}.")
    if alike:
        parts.append(f"Within its uncertainty: {listed(alike)}.")
    if unknown:
        needed = least_runs(comparison.error)
        parts.append(f"Not enough seeds to tell it from {listed(unknown)}: {needed} in common are needed.")
    return " ".join(parts)


def accuracies(comparison: Comparison) -> list[Accuracy]:
    """Of each row; rows that differ in the loader alone are one where their accuracies are the same."""
    found: dict[int, Accuracy] = {}
    for row in comparison.rows:
        if row.accuracies:
            found[id(row)] = Accuracy(row_name(comparison, row), row.accuracies, _images(row))
    for shared, rows in comparison.loader_groups().items():
        known = [row for row in rows if row.accuracies]
        if len(known) > 1 and all(row.accuracies == known[0].accuracies for row in known):
            for row in known:
                del found[id(row)]
            found[id(known[0])] = Accuracy(where(shared) or "every loader", known[0].accuracies, _images(known[0]))
    return list(found.values())


def _images(row: Configuration) -> int | None:
    sizes = {(run.result.get("dataset") or {}).get("test_size") for run in row.runs if run.status == "completed"}
    return sizes.pop() if len(sizes) == 1 else None


def _uncertainty(best: Accuracy) -> str:
    number = len(best.by_seed)
    low, high = min(best.by_seed.values()), max(best.by_seed.values())
    seeds = f"{low:.2f}–{high:.2f} over {number} seeds" if number > 1 else "one seed"
    if not best.interval:
        return f"number of evaluated images unknown, so no interval; {seeds}"
    return f"95% interval {best.interval[0]:.2f}–{best.interval[1]:.2f} of {best.images:,} images; {seeds}"
