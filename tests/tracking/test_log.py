"""The log lines of a run."""

from __future__ import annotations

import logging

import pytest

from vitmnist.tracking.log import suggest_loader
from vitmnist.tracking.metrics import METRICS
from vitmnist.tracking.result import Result


@pytest.mark.parametrize(("waiting", "suggested"), [(30.0, True), (5.0, False)])
def test_a_run_that_waits_for_data_is_told_what_helps(
    waiting: float, suggested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    record = {metric.name: 1.0 for metric in METRICS} | {"epoch": 0, "data_wait_pct": waiting}
    with caplog.at_level(logging.INFO):
        suggest_loader(Result(overrides=[], choices={}, epochs=[record]))
    assert ("30% of the training time was spent waiting for data; data/loader=auto" in caplog.text) == suggested
