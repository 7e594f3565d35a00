"""The log lines of a run."""

from __future__ import annotations

import logging

import pytest

from vitmnist.metrics.epoch_table import epoch_metrics
from vitmnist.tracking.log import log_verdict
from vitmnist.tracking.result import Result

ADVICE = "; data/loader=auto measures which loader helps"


@pytest.mark.parametrize(
    ("waiting_pct", "train_size", "message"),
    [
        (30.0, 960, "balanced: 30% of the time is spent waiting for data" + ADVICE),
        (5.0, 960, "compute-bound: 5% of the time is spent waiting for data"),
        (30.0, 480, "no verdict: it needs 20 steps, and only 10 were measured"),
    ],
)
def test_a_run_ends_with_what_limited_it_and_no_bound_that_was_not_measured(
    waiting_pct: float, train_size: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = {metric.name: 1.0 for metric in epoch_metrics().values()} | {"epoch": 0, "data_wait_pct": waiting_pct}
    result = Result(epochs=[record], config={"batch_size": 50}, dataset={"train_size": train_size})
    with caplog.at_level(logging.INFO):
        log_verdict(result)
    assert caplog.messages == [message]
    assert result.verdict() == message.removesuffix(ADVICE)
