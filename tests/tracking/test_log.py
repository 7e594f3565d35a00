"""The log lines of a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vitmnist.runtime.cpu import Cores
from vitmnist.tracking.epoch_table import epoch_metrics
from vitmnist.tracking.log import log_shared_cores, log_verdict
from vitmnist.tracking.result import Result

ADVICE = "; data/loader=auto measures which loader helps"


@pytest.mark.parametrize(
    ("waiting_pct", "cores_busy", "train_size", "message"),
    [
        (30.0, 1.0, 960, "balanced: 30% of the time is spent waiting for data, with 1.0 of 2 cores busy" + ADVICE),
        (5.0, 1.0, 960, "compute-bound: 5% of the time is spent waiting for data, with 1.0 of 2 cores busy"),
        (
            2.0,
            1.9,
            960,
            "2% of the time is spent waiting for data, with 1.9 of 2 cores busy; whether loading slows down the step "
            "is not measured" + ADVICE,
        ),
        (30.0, 1.0, 480, "no verdict: it needs 20 steps, and only 10 were measured"),
    ],
)
def test_a_run_ends_with_what_limited_it_and_no_bound_that_was_not_measured(
    waiting_pct: float, cores_busy: float, train_size: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = {metric.name: 1.0 for metric in epoch_metrics().values()} | {"epoch": 0, "data_wait_pct": waiting_pct}
    result = Result(overrides=[], choices={}, epochs=[record | {"cores_busy": cores_busy}], batch_size=50)
    result.dataset, result.environment = {"train_size": train_size}, {"cpu_count": 2}
    with caplog.at_level(logging.INFO):
        log_verdict(result)
    assert caplog.messages == [message]
    assert result.verdict() == message.removesuffix(ADVICE)


SHARED = Cores(4, busy=1.9, others=2.0)
STARTS = [True, False]  # `first_of_start` of the epochs
MACHINE = {"torch_threads": 4, "env": {"OMP_WAIT_POLICY": "active"}}
FEWER_THREADS = "fewer, as with OMP_NUM_THREADS=1, may make epochs shorter and steadier"


@pytest.mark.parametrize(
    ("cores", "starts", "machine", "is_said"),
    [
        (SHARED, STARTS, MACHINE, True),
        (SHARED, [True, False, True, False], MACHINE, True),  # resumed
        (SHARED, [True], MACHINE, False),  # the first epoch warms up
        (SHARED, [True, False, False], MACHINE, False),  # it has been said
        (SHARED, STARTS, MACHINE | {"env": {"OMP_NUM_THREADS": "2"}}, False),
        (SHARED, STARTS, None, False),  # of another rank than 0
        (Cores(4, busy=3.9, others=0.1), STARTS, MACHINE, False),  # a quiet machine
        (Cores(4, busy=1.0, others=1.5), STARTS, MACHINE, False),  # with free cores
    ],
)
def test_fewer_threads_are_advised_once_where_others_were_measured_on_their_cores(
    cores: Cores, starts: list[bool], machine: dict[str, Any] | None, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = [{"epoch": number, "first_of_start": first} for number, first in enumerate(starts)]
    result = Result(overrides=[], choices={}, epochs=epochs, device="cpu", environment=machine)
    with caplog.at_level(logging.INFO):
        log_shared_cores(result, cores)
    message = f"other programs use 2.0 of 4 cores, on which torch runs 4 threads: {FEWER_THREADS}"
    assert caplog.messages == [message] * is_said
