"""The log lines of a run."""

from __future__ import annotations

import logging

import pytest

from vitmnist.tracking.log import log_verdict
from vitmnist.tracking.metrics import METRICS
from vitmnist.tracking.result import Result


@pytest.mark.parametrize(
    ("waiting_s", "message"),
    [
        (
            3.0,
            "balanced: 30% of the time is spent waiting for data; without waiting a batch would take 700 ms instead of "
            "1,000 ms, 1.43 times faster; data/loader=auto measures which loader helps",
        ),
        (
            0.5,
            "compute-bound: 5% of the time is spent waiting for data; no loader can make it more than 1.05 times "
            "faster",
        ),
    ],
)
def test_a_run_ends_with_what_limited_it(waiting_s: float, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """10 batches in 10 seconds."""
    record = {metric.name: 1.0 for metric in METRICS} | {"epoch": 0, "train_s": 10.0, "data_wait_s": waiting_s}
    result = Result(overrides=[], choices={}, epochs=[record], batch_size=50, dataset={"train_size": 480})
    with caplog.at_level(logging.INFO):
        log_verdict(result)
    assert caplog.messages == [message]
    assert result.verdict() == message.partition("; data/loader")[0]
