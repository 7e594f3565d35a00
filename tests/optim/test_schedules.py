"""The learning rate of each step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn

from tests.conftest import Printed
from vitmnist.errors import ConfigError
from vitmnist.optim.base import OPTIMIZERS, build_schedule

ONE_CYCLE = {"name": "one_cycle", "warmup": 0.3, "start_factor": 0.04, "end_factor": 0.0001}


def learning_rates(options: dict, steps: int) -> list[float]:
    factor = build_schedule(options, 1, steps)
    return [0.5 * factor(step) for step in range(steps)]


def test_one_cycle_rises_to_the_learning_rate_and_falls() -> None:
    lrs = learning_rates(ONE_CYCLE, 1000)
    assert lrs[0] == pytest.approx(0.5 * 0.04)
    assert max(lrs) == lrs[300] == pytest.approx(0.5)
    assert lrs[:301] == sorted(lrs[:301])
    assert lrs[300:] == sorted(lrs[300:], reverse=True)
    assert lrs[-1] == pytest.approx(0.5 * 0.0001, rel=0.1)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.1, 0.5, 0.99])
def test_one_cycle_stays_in_range_in_a_short_run(steps: int, warmup: float) -> None:
    assert all(0 < lr <= 0.5 for lr in learning_rates({**ONE_CYCLE, "warmup": warmup}, steps))


@pytest.mark.parametrize("warmup_epochs", [0, 0.25, 1, 3])
def test_cosine_warms_up_for_some_epochs_and_falls_to_its_final_factor(warmup_epochs: float) -> None:
    options = {"name": "cosine", "warmup_epochs": warmup_epochs, "final_factor": 0.1}
    factor, peak = build_schedule(options, 4, 100), round(100 * warmup_epochs)
    factors = [factor(step) for step in range(400)]
    rises = [later - earlier for earlier, later in pairwise(factors[: peak + 1])]
    assert rises == pytest.approx([1 / (peak + 1)] * peak)
    assert max(factors) == factors[peak] == 1
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[(peak + 400) // 2] == pytest.approx(0.55, abs=0.01)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_warm_up_that_fills_the_run_is_refused_by_its_key(quick: list[str], refuse: Printed) -> None:
    message = "schedule.warmup_epochs=2: must be below epochs=2"
    assert message in refuse(*quick, "schedule=cosine", "schedule.warmup_epochs=2")


def test_nesterov_needs_momentum() -> None:
    options = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "nesterov": True, "weight_decay": 0.0}
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true needs optimizer\.momentum above 0"):
        OPTIMIZERS.build(options, nn.Linear(1, 1), False)
