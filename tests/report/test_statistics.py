"""The report finds real differences with three rounds, and seldom a false one."""

from collections.abc import Mapping
from itertools import permutations

import numpy as np
import pytest

from vitmnist.report.statistics import ConfidenceInterval, PairwiseComparison, T


def simulated(random: np.random.Generator, configurations: int, rounds: int, noise: list[float]) -> np.ndarray:
    """Log times [configuration, round] of equal configurations, in a drawn order, on a machine whose speed drifts.

    The drift is AR(1) over the runs, with a standard deviation of 4% and a correlation of 0.9.
    """
    log_times, drift = np.empty((configurations, rounds)), random.normal(0, 0.04)
    for round_index in range(rounds):
        for configuration in random.permutation(configurations):
            log_times[configuration, round_index] = drift + random.normal(0, noise[configuration])
            drift = 0.9 * drift + random.normal(0, 0.04 * (1 - 0.9**2) ** 0.5)
    return log_times


def compare_all(times: Mapping[T, Mapping[str, float]]) -> dict[tuple[T, T], ConfidenceInterval]:
    """The ratio of each pair that has a round in common."""
    ratios = PairwiseComparison(times, as_ratios=True)
    return {pair: ratio for pair in permutations(times, 2) if (ratio := ratios.compare(*pair))}


def named_pairs(log_times: np.ndarray) -> set[tuple[int, int]]:
    """The pairs that are called different."""
    times = np.exp(log_times).tolist()
    ratios = compare_all({name: dict(zip("abcdefgh", row, strict=False)) for name, row in enumerate(times)})
    return {pair for pair, factor in ratios.items() if factor.is_clear}


EQUAL, NOISY = [0.02] * 12, [0.12, *[0.02] * 11]
VERY_NOISY = [0.3, 0.1, *[0.01] * 6]


@pytest.mark.parametrize(
    ("noise", "rounds"),
    [(EQUAL[:2], 3), (EQUAL[:3], 8), (EQUAL, 3), (NOISY[:2], 3), (NOISY[:3], 8), (NOISY, 3), (VERY_NOISY, 3)],
)
def test_of_equal_configurations_about_one_report_in_20_names_any(noise: list[float], rounds: int) -> None:
    """This holds even if some configurations are much noisier than the others."""
    random = np.random.default_rng(len(noise))
    wrong = sum(bool(named_pairs(simulated(random, len(noise), rounds, noise))) for _ in range(300))
    assert wrong / 300 <= 0.065


@pytest.mark.parametrize(("factor", "power"), [(1.84, 1.0), (1.2, 0.95)])
@pytest.mark.parametrize("configurations", [2, 5])
def test_a_difference_is_found_with_three_rounds(factor: float, power: float, configurations: int) -> None:
    random, named = np.random.default_rng(configurations), 0
    for _ in range(100):
        log_times = simulated(random, configurations, 3, [0.02] * configurations)
        log_times[-1] += np.log(factor)
        named += (configurations - 1, 0) in named_pairs(log_times)
    assert named / 100 >= power


def test_the_interval_of_two_configurations_is_that_of_a_paired_t_test() -> None:
    factor = compare_all({"a": {"1": 2.0, "2": 2.2, "3": 2.3}, "b": dict.fromkeys("123", 1.0)})["a", "b"]
    logs = np.log([2.0, 2.2, 2.3])
    half = 4.30265 * logs.std(ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    assert (factor.low, factor.high) == pytest.approx(tuple(np.exp([logs.mean() - half, logs.mean() + half])), rel=1e-3)


def test_pairs_are_compared_over_the_rounds_that_both_have() -> None:
    often, twice, apart = dict.fromkeys("abc", 2.0), {"g": 3.0, "h": 3.0}, dict.fromkeys("xyz", 1.0)
    assert compare_all({}) == {}
    ratios = compare_all(dict(enumerate([dict.fromkeys("abcdefgh", 1.0), often, twice, apart])))
    assert {pair for pair in ratios if pair[0] < pair[1]} == {(0, 1)}, "two rounds are too few"
    assert str(ratios[1, 0]) == "2.00 times as long (95% interval 2.00–2.00)"


def test_a_difference_below_one_percent_is_none() -> None:
    for factor, expected in ((1.009, set()), (1.011, {(0, 1), (1, 0)})):
        assert named_pairs(np.log([[factor] * 3, [1.0] * 3])) == expected
