"""What the report calls an interval contains the true median; what it calls a difference is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from vitmnist.report.grouping import compare
from vitmnist.report.intervals import ERROR, PairedRatio, Spread, median_interval, required_rounds, wilson
from vitmnist.report.summary import fastest
from vitmnist.tracking.runs import Run

SIMULATIONS = 1000
# Three standard deviations of a rate of 5% in so many simulations; beyond it by chance in 1 of 700 cases.
SLACK = 3 * (0.05 * 0.95 / SIMULATIONS) ** 0.5


def medians_of_runs(
    runs: int, configurations: int, effect: float = 1.0, epochs: int = 9, noise: float = 0.05
) -> np.ndarray:
    """Median epoch times [simulation, configuration, run]: a drift per round, an effect per run, noise per epoch.

    The last configuration takes `effect` times as long as the others.
    """
    random = np.random.default_rng(1000 * configurations + runs)
    drift = random.normal(0, 0.1, (SIMULATIONS, 1, runs))
    run = random.normal(0, noise, (SIMULATIONS, configurations, runs))
    epoch = random.normal(0, noise, (SIMULATIONS, configurations, runs, epochs))
    run[:, -1] += np.log(effect)
    return np.exp(np.median(drift[..., None] + run[..., None] + epoch, axis=-1))


def named_different(times: Sequence[Sequence[float]]) -> bool:
    """Whether the fastest of the configurations is called faster than another."""
    best, *others = sorted(times, key=median)
    error = ERROR / (len(times) * len(others) / 2)
    pairs = [[one / fastest for one, fastest in zip(other, best, strict=True)] for other in others]
    return any(PairedRatio.of(ratios, error).is_difference for ratios in pairs)


@pytest.mark.parametrize("runs", range(1, 21))
def test_intervals_hold_what_they_say(runs: int) -> None:
    """With epochs that are clustered in runs, the interval contains the true median in at least 95% of cases."""
    times = medians_of_runs(runs, 2)
    found = [interval for one in times[:, 0].tolist() if (interval := median_interval(one))]
    assert len(found) == (SIMULATIONS if runs >= 6 else 0)
    if found:
        covered = sum(interval.low <= 1 <= interval.high for interval in found) / SIMULATIONS
        assert covered >= 0.95 - SLACK
        assert abs(covered - found[0].coverage) < SLACK
        assert found[0].coverage >= 0.95


@pytest.mark.parametrize("configurations", [2, 4])
@pytest.mark.parametrize("runs", range(1, 21))
def test_equal_configurations_are_called_different_in_at_most_one_report_of_twenty(
    runs: int, configurations: int
) -> None:
    wrong = sum(map(named_different, medians_of_runs(runs, configurations).tolist())) / SIMULATIONS
    assert wrong <= 0.05 + SLACK
    if runs < {2: 6, 4: 8}[configurations]:
        assert wrong == 0


def test_a_difference_of_a_tenth_is_found_with_eight_runs() -> None:
    for configurations in (2, 4):
        times = medians_of_runs(8, configurations, effect=1.1, noise=0.01)
        assert np.mean([named_different(one) for one in times.tolist()]) > 0.95


@pytest.mark.parametrize(
    ("number", "rank", "coverage"),
    [(6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375), (20, 6, 0.9586), (50, 18, 0.9672)],
)
def test_ranks_are_those_of_the_table_in_conover(number: int, rank: int, coverage: float) -> None:
    interval = median_interval([float(value) for value in range(1, number + 1)])
    assert (interval.low, interval.high) == (rank, number + 1 - rank)
    assert interval.coverage == pytest.approx(coverage, abs=1e-4)


def test_few_runs_have_no_interval() -> None:
    assert Spread.of([]) is None
    assert Spread.of([[1.0], [2.0], [4.0], [4.0], [5.0]]) == Spread(4.0, 1.0, 5.0, 5, None)
    assert Spread.of([[1.0, 2.0], [3.0, 4.0, 5.0]]).interval is None
    assert not PairedRatio.of([1.009] * 6).is_difference  # less than 1%
    assert PairedRatio.of([1.1] * 6).is_difference
    assert [required_rounds(ERROR / pairs) for pairs in (1, 6, 66)] == [6, 8, 12]


def test_wilson_is_that_of_the_textbook() -> None:
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def simulated_sweep(random: np.random.Generator, rounds: int, seeds: int) -> list[Run]:
    """Four equal loaders on a machine whose speed wanders (AR(1), 2%) from run to run, with 0.5% noise per run."""
    loaders = ("disk", "ram", "cache", "gpu_slice")
    order = [(number, loader, seed) for number in range(rounds) for loader in loaders for seed in range(seeds)]
    speed, runs = 0.0, []
    for place, (number, loader, seed) in enumerate(order):
        speed = 0.95 * speed + random.normal(0, 0.02 * (1 - 0.95**2) ** 0.5)
        seconds = np.exp(speed + random.normal(0, 0.005))
        epochs = [{"epoch_s": time, "train_s": 0.1} for time in (9.0, float(seconds))]
        config = {"repeat": number, "seed": seed, "data.loader.name": loader}
        result = {"epochs": epochs, "environment": {"python": "3.12"}}
        runs.append(Run(Path("sweep") / str(place), "completed", "", config, result))
    return runs


@pytest.mark.parametrize(("rounds", "seeds"), [(1, 8), (2, 4), (8, 3)])
def test_a_report_over_seeds_and_rounds_is_wrong_at_most_once_in_twenty(rounds: int, seeds: int) -> None:
    """The seeds of a round run one after another on a machine that wanders: they are a single measurement."""
    random, reports, wrong = np.random.default_rng(rounds), 150, 0
    for _ in range(reports):
        (comparison,) = compare(simulated_sweep(random, rounds, seeds))
        wrong += "In comparison" in fastest(comparison)
    assert wrong / reports <= 0.05 + 3 * (0.05 * 0.95 / reports) ** 0.5
