"""The learning rate of each step."""

import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from tests.conftest import Printed, assert_same_run, result_of
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
    for steps, warmup in product([1, 2, 3, 10], [0.1, 0.5, 0.99]):  # A short run stays in range.
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


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"every_epochs": 2, "factor": 0.5}, lambda adam: torch.optim.lr_scheduler.StepLR(adam, 14, 0.5)),
        ({"at_epochs": [1, 1.5, 3]}, lambda adam: torch.optim.lr_scheduler.MultiStepLR(adam, [7, 11, 21], 0.1)),
        ({"at_epochs": []}, lambda adam: torch.optim.lr_scheduler.ConstantLR(adam, 1.0)),
    ],
)
def test_step_decays_as_torch_does(options: dict, reference) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = reference(optimizer)
    factor = build_schedule({"every_epochs": 10, "at_epochs": None, "factor": 0.1} | options | {"name": "step"}, 5, 7)
    for step in range(35):
        assert factor(step) == pytest.approx(scheduler.get_last_lr()[0]), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("steps_per_epoch", "decays"), [(100, [110, 220, 330]), (7, [8, 16, 24]), (70, [77, 154, 231])]
)
@pytest.mark.parametrize("options", [{"at_epochs": [1.1, 2.2, 3.3]}, {"every_epochs": 1.1}])
def test_decimal_epochs_decay_at_the_first_step_that_reaches_them(
    options: dict, steps_per_epoch: int, decays: list[int]
) -> None:
    """In binary, 1.1 epochs of 100 steps are slightly more than 110 steps."""
    factor = build_schedule(options | {"name": "step"}, 4, steps_per_epoch)
    changes = [step for step in range(1, 4 * steps_per_epoch) if factor(step) != factor(step - 1)]
    assert changes == decays


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_plateau_decays_as_torch_does_and_from_recorded_values_alone(patience: int) -> None:
    values = [50.0, 60.0, 60.0, 59.0, None, 61.0, 61.0, None, 61.0, 60.0, 61.5, None, None, None, 3.0, 3.0, 3.0, 3.0]
    options = {"name": "plateau", "factor": 0.5, "patience": patience, "min_factor": 0.05}
    recorded: list[float | None] = []
    factor = build_schedule(options, 18, 3, lambda: recorded)
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", 0.5, patience - 1, threshold=0, min_lr=0.05
    )
    for epoch, value in enumerate(values):
        expected = optimizer.param_groups[0]["lr"]
        assert [factor(3 * epoch + step) for step in range(3)] == [expected] * 3, epoch
        recorded.append(value)
        assert factor(3 * epoch + 2) == expected, "a value counts from the next epoch on"
        scheduler.step(math.nan if value is None else value)
    assert expected < 1


def test_a_resumed_run_keeps_its_plateau_bit_for_bit(quick: list[str], succeed: Printed, tmp_path: Path) -> None:
    plateau = ["schedule=plateau", "schedule.patience=1", "monitor=eval_loss", "optimizer.lr=0.1", "log.every_steps=1"]
    arguments = [*quick, *plateau, "data.holdout=8", "epochs=5"]
    for typed in ([*arguments, "hydra.run.dir=whole"], [*arguments, "hydra.run.dir=cut", "epochs=3"]):
        succeed(*typed)
    succeed("resume=cut", "epochs=5")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    lrs = [{step["lr"] for step in epoch["steps"]} for epoch in result_of(tmp_path / "cut")["epochs"]]
    assert [len(lr) for lr in lrs] == [1] * 5
    assert lrs[-1].pop() < 0.05


def test_plateau_needs_a_validation_split(quick: list[str], refuse: Printed) -> None:
    message = "error: schedule=plateau: needs a validation split, or the test split would choose the epoch"
    assert message in refuse(*quick, "schedule=plateau")
