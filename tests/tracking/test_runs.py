"""How runs are found, and what their records say in `status` and at the end of a run."""

import logging
from pathlib import Path

import pytest

from tests.conftest import CallHere
from tests.support.records import write_run
from vitmnist.cli import report, status
from vitmnist.errors import DataError
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.tracking.log import log_bottleneck
from vitmnist.tracking.result import Result
from vitmnist.tracking.runs import find_runs


@pytest.mark.needs("POSIX files")
def test_control_characters_of_a_record_are_escaped_where_they_are_printed(tmp_path: Path, call_here: CallHere) -> None:
    write_run(tmp_path / "1\x1b[2J", config={"title": "\x9b"}, status="failed", error="\x1b[31mred", device="\ud800")
    write_run(tmp_path / "2", device="cpu")
    for command in (report, status):
        printed = call_here(command.main, ".").stdout
        assert r"\x1b[" in printed
        assert printed.replace("\n", "").isprintable()


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, "contains no runs"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(DataError, match=problem):
            find_runs([folder])
    for index in (10, 9, 2):
        write_run(tmp_path / "sweep" / f"{index}-x")
    folders = find_runs([tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "9-x"])
    assert [folder.name for folder in folders] == ["2-x", "9-x", "10-x"]


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
