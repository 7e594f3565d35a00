"""The learning rate of each step."""

from __future__ import annotations

import pytest
from torch import nn

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


def test_nesterov_needs_momentum() -> None:
    options = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "nesterov": True, "weight_decay": 0.0}
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true needs optimizer\.momentum above 0"):
        OPTIMIZERS.build(options, nn.Linear(1, 1), False)
