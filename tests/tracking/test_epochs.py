"""`epochs.csv` has one row for each epoch of the record, at any moment and after any end of the run."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import AddMembers, Printed, Start, Train, result_of
from vitmnist.errors import ExitCode, TrainingError
from vitmnist.metrics import METRICS, BatchMetric, Metric
from vitmnist.metrics.epoch_record import check_metrics
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.registry import Member
from vitmnist.tracking.log import log_epoch


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "epochs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same_epochs(folder: Path) -> None:
    """Compare `epochs.csv` with the epochs of `result.json`, to the last digit."""
    epochs = [
        {name: value for name, value in epoch.items() if name != "steps"} for epoch in result_of(folder)["epochs"]
    ]
    as_text = [{name: "" if value is None else str(value) for name, value in epoch.items()} for epoch in epochs]
    assert rows(folder) == as_text


def test_a_killed_run_keeps_its_rows_and_repeats_none(
    quick: list[str], start: Start, train_here: Train, succeed: Printed, tmp_path: Path
) -> None:
    """Its only checkpoint is older than its last row, which may be cut off; a row is appended to the same file."""
    run = tmp_path / "run"
    succeed(*quick, "epochs=1", "hydra.run.dir=run")
    started = start("resume=run", "epochs=100000", "checkpoint.min_interval_s=null").until("epoch 2/100000")
    with (run / "epochs.csv").open() as table:
        started.until("epoch 5/100000").kill_group()
        assert "\n3," in table.read()
    assert [row["epoch"] for row in rows(run)][:4] == ["0", "1", "2", "3"]
    with (run / "epochs.csv").open("a") as table:
        table.write("99,0.1")
    assert train_here("resume=run", "epochs=2", "max_minutes=0").returncode == ExitCode.UNFINISHED
    assert [row["epoch"] for row in rows(run)] == ["0"]
    for epochs in (2, 3):
        succeed("resume=run", f"epochs={epochs}", "max_minutes=null")
        assert [row["epoch"] for row in rows(run)] == [*map(str, range(epochs))]
        assert_same_epochs(run)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [("eval_acc", math.nan, ""), ("eval_acc", math.inf, ""), ("eval_loss", math.inf, "; try a smaller optimizer.lr")],
)
def test_a_value_that_is_not_finite_ends_the_run(name: str, value: float, advice: str) -> None:
    """Otherwise the run could be neither resumed nor reported. A negative value is allowed."""
    check_metrics({"eval_mcc": -0.03, "gpu_peak_mib": None}, "epoch 1")
    with pytest.raises(TrainingError, match=f"^epoch 1: {name} is {value}; it must be finite{advice}$"):
        check_metrics({"eval_mcc": -0.03, name: value}, "epoch 1")


def test_a_metric_may_be_registered_late_but_not_with_the_name_of_another(add_members: AddMembers) -> None:
    assert "eval_late" not in build_epoch_table()
    add_members(METRICS, late=Member(BatchMetric("%", tag="late"), max))
    assert {"train_late", "eval_late"} <= build_epoch_table().keys()
    add_members(METRICS, loss=Member(BatchMetric("%", tag="other"), max))
    with pytest.raises(ValueError, match="two metrics are called eval_loss, train_loss; choose another name"):
        build_epoch_table()
    with pytest.raises(ValueError, match="metrics: 'plain' must be declared as a BatchMetric or a ConfusionMetric"):
        METRICS.register("plain", Metric("%", tag="plain"))


def test_a_headline_is_in_the_first_groups_of_tensorboard_and_in_the_log_line(
    add_members: AddMembers, caplog: pytest.LogCaptureFixture
) -> None:
    add_members(METRICS, late=Member(BatchMetric("%", tag="late", digits=1, is_headline=True), max))
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
