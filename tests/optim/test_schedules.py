"""The learning rate of each step."""

from itertools import pairwise

import pytest
import torch

from vitmnist.optim.schedules import build_schedule

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
    assert build_schedule(ONE_CYCLE, 1, 1000)(1000) == lrs[-1] / 0.5, "a step beyond the run has the last factor"
    assert lrs[-1] == pytest.approx(0.5 * 0.0001, rel=0.1)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.1, 0.5, 0.99])
def test_one_cycle_stays_in_range_in_a_short_run(steps: int, warmup: float) -> None:
    assert all(0 < lr <= 0.5 for lr in learning_rates({**ONE_CYCLE, "warmup": warmup}, steps))


@pytest.mark.parametrize("warmup_epochs", [0, 0.25, 1, 3])
def test_cosine_warms_up_for_some_epochs_and_anneals_as_torch_does(warmup_epochs: float) -> None:
    options = {"name": "cosine", "warmup_epochs": warmup_epochs, "final_factor": 0.1}
    factor, peak = build_schedule(options, 4, 100), round(100 * warmup_epochs)
    factors = [factor(step) for step in range(400)]
    rises = [later - earlier for earlier, later in pairwise(factors[: peak + 1])]
    assert rises == pytest.approx([1 / (peak + 1)] * peak)
    assert max(factors) == factors[peak] == 1
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400 - peak, eta_min=0.1)
    for step in range(peak, 400):
        assert factor(step) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
