"""Learning rates move with the step as their YAML says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitmnist.errors import ConfigError
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.optim.schedules import SCHEDULES

ONE_CYCLE = {"name": "one_cycle", "warmup": 0.3, "start_factor": 0.04, "end_factor": 0.0001}


def rates(options: dict, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = SCHEDULES.build(options, optimizer, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_stays() -> None:
    assert rates({"name": "constant"}, 20) == [0.5] * 20


def test_one_cycle_goes_up_and_down() -> None:
    seen = rates(ONE_CYCLE, 1000)
    assert seen[0] == pytest.approx(0.5 * 0.04)
    assert max(seen) == seen[300] == pytest.approx(0.5)
    assert seen[:301] == sorted(seen[:301])
    assert seen[300:] == sorted(seen[300:], reverse=True)
    assert seen[-1] == pytest.approx(0.5 * 0.0001, rel=0.1)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.1, 0.5, 0.99])
def test_one_cycle_fits_into_the_shortest_run(steps: int, warmup: float) -> None:
    assert all(0 < rate <= 0.5 for rate in rates({**ONE_CYCLE, "warmup": warmup}, steps))


def test_nesterov_needs_momentum() -> None:
    options = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "nesterov": True, "weight_decay": 0.0}
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true needs optimizer\.momentum above 0"):
        OPTIMIZERS.build(options, nn.Linear(1, 1), False)
