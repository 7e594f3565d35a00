"""Verdicts and advice follow from the figures."""

from __future__ import annotations

from typing import Any

import pytest

from vitmnist.diagnosis.advice import advise
from vitmnist.diagnosis.verdict import verdict


def test_verdicts_name_the_limit_and_what_can_be_gained() -> None:
    assert verdict(0.022, 0.020) == (
        "input-bound: 91% of the time is spent waiting for data; without waiting a batch would take 2.0 ms instead of "
        "22.0 ms, 11 times faster"
    )
    assert verdict(0.020, 0.010).startswith("balanced: 50% of")
    assert verdict(0.020, 0.0004) == (
        "compute-bound: 2% of the time is spent waiting for data; no loader can make it more than 1.02 times faster"
    )


@pytest.mark.parametrize(
    ("changed", "cores", "expected"),
    [
        ({"num_workers": 0}, 8, "try num_workers=5 (8 cores available), or use vitmnist.from_dataloader(loader)"),
        ({"num_workers": 0}, 2, "try num_workers=2 (2 cores available)"),
        ({"num_workers": 2}, 8, "slower than the step of 2.0 ms; try num_workers=5"),
        ({"num_workers": 2}, 2, "none of the 2 cores is free; use vitmnist.from_dataloader(loader)"),
        ({"num_workers": 2, "t1_per_worker_s": 0.001}, 2, "try a larger prefetch_factor"),
        ({"num_workers": 2, "t1_s": None, "t1_per_worker_s": None}, 2, "T1 is unknown; measure the alternatives"),
        ({"verdict": "compute-bound: …", "waiting_pct": 1.0}, 2, "the loader is not the problem: 99% of the time"),
    ],
)
def test_advice_follows_from_the_figures(changed: dict[str, Any], cores: int, expected: str) -> None:
    measured = {"batch_s": 0.012, "waiting_s": 0.010, "step_s": 0.002, "waiting_pct": 83.0, "verdict": "input-bound: …"}
    made = {"t1_s": 0.010, "t1_per_worker_s": 0.005, "num_workers": 2, "is_map_style": True}
    epochs = {"first_batches_s": [0.2, 0.120, 0.120], "first_batches_pct": 10.0, "num_loaders": 1}
    figures = {**measured, **made, **epochs, "persistent_workers": False, **changed}
    first, *more = advise(figures, cores, "python -m vitmnist.diagnose mine.py")
    assert expected in first.text
    has_workers = changed.get("num_workers", 2) > 0
    assert ["the first batch of an epoch takes 120 ms, 10% of the time" in advice.text for advice in more] == (
        [True] * has_workers
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "time; persistent_workers=True keeps the workers from one epoch to the next"),
        ({"num_loaders": 3}, "time; build the DataLoader once, before the epochs: persistent_workers=True keeps"),
        ({"persistent_workers": True}, "time; make the epochs longer, or use vitmnist.from_dataloader(loader)"),
    ],
)
def test_more_workers_are_not_advised_if_the_starts_of_epochs_dominate(changed: dict[str, Any], expected: str) -> None:
    measured = {"waiting_pct": 80.0, "first_batches_pct": 70.0, "verdict": "input-bound: …", "is_map_style": True}
    loader = {"first_batches_s": [0.2, 0.120], "num_workers": 2, "persistent_workers": False, "num_loaders": 1}
    (advice,) = advise({**measured, **loader, **changed}, 8, "python -m vitmnist.diagnose mine.py")
    assert expected in advice.text
