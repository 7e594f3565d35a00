"""The lines of the log that name the monitored metric and what limited the run."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import AddMembers
from vitmnist.metrics import METRICS, BatchMetricInfo
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.registry import Member, NoOptions
from vitmnist.tracking.log import log_bottleneck, log_epoch
from vitmnist.tracking.result import Result


def test_a_headline_is_in_the_first_groups_of_tensorboard_and_in_the_log_line(
    add_members: AddMembers, caplog: pytest.LogCaptureFixture
) -> None:
    info = BatchMetricInfo(unit="%", tag="late", direction="max", digits=1, is_headline=True)
    add_members(METRICS, late=Member(NoOptions, max, info))
    table = build_epoch_table()
    assert [table[name].tag for name in ("train_late", "eval_late")] == ["train/late", "eval/late"]
    caplog.set_level("INFO")
    result = SimpleNamespace(epochs=[dict.fromkeys(table, 1.0) | {"epoch": 0}], eval_split="test")
    log_epoch(result, 2, table["eval_acc"])
    values = "loss 1.0000 acc 1.00% late 1.0%"
    assert f"epoch 1/2  train {values}  test {values}  1.00 s, 1.0% of training waiting for data, 1 im" in caplog.text


@pytest.mark.parametrize(("name", "is_added"), [("eval_s", True), ("eval_acc", False)])
def test_the_log_line_of_an_epoch_shows_the_monitored_metric(
    name: str, is_added: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    result = SimpleNamespace(epochs=[dict.fromkeys(build_epoch_table(), 1.0) | {"epoch": 0}], eval_split="test")
    log_epoch(result, 1, build_epoch_table()[name])
    assert (f"{name} 1" in caplog.text) == is_added


WAITING = "5% of the time is spent waiting for data"
LIMITS = {
    "balanced: 30% of the time is spent waiting for data; data/loader=auto measures which loader helps": (30.0, 20, {}),
    f"compute-bound: {WAITING}": (5.0, 20, {"host_lead_s": 0.03}),
    f"launch-bound: the GPU waits for Python, and {WAITING}; trainer=fast or a larger batch_size helps": (
        *(5.0, 20),
        {"host_lead_s": 0.02},
    ),
    "no verdict: it needs 20 steps, and only 10 were measured": (30.0, 10, {}),
}


@pytest.mark.parametrize(("message", "measured"), LIMITS.items(), ids=["input", "compute", "launch", "steps"])
def test_a_run_ends_with_what_limited_it_and_no_bound_that_was_not_measured(
    message: str, measured: tuple[float, int, dict[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, a run is compute-bound if the host has queued at least half a step (of 1 s / 20) ahead.

    With a graph, the end of an epoch shows this only if there is no short last batch.
    """
    waiting_pct, steps, parts = measured
    record = {metric.name: 1.0 for metric in build_epoch_table().values()} | {"epoch": 0, "data_wait_pct": waiting_pct}
    with caplog.at_level(logging.INFO):
        for graph, drop_last in ((False, False), (True, False), (True, True)):
            result = Result(folder=Path(), epochs=[record | parts], device="cuda:0" if parts else "cpu")
            result.config = {"batch_size": 10, "data": {"drop_last": drop_last}}
            result.trainer = {"graph": graph}
            result.dataset = {"train_size": 10 * steps + 1 if drop_last else 10 * steps - 1}
            log_bottleneck(result)
    without_lead = message if "launch" not in message else f"compute-bound: {WAITING}"
    assert caplog.messages == [message, without_lead, message.replace("trainer=fast or ", "")]
