"""The metrics of an epoch have names of their own and finite values; the monitored one chooses the best epoch."""

import math
import os
import re
import signal
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest

from tests.conftest import AddMembers, Printed, Train, result_of
from vitmnist import load_model, trainer
from vitmnist.checkpoint import storage
from vitmnist.errors import DataError, ExitCode, TrainingError
from vitmnist.metrics import METRICS, BatchMetricInfo, MetricInfo
from vitmnist.metrics.epoch_record import Monitor, drop_non_finite
from vitmnist.metrics.epoch_table import build_epoch_table, find_metric
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.registry import Member, NoOptions
from vitmnist.runtime.world import World
from vitmnist.training import loop

HELD_OUT = ("data.holdout=5", "checkpoint.min_interval_s=0")


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("acc", [50, 70, 70, 60], 1),
        ("eval_loss", [3, 2, 2.5, 2], 1),
        ("macro_f1", [None, 10, None], 1),
        ("macro_f1", [None], None),
    ],
)
def test_the_best_epoch_is_the_first_with_the_best_value(name: str, values: list, best: int | None) -> None:
    metric = find_metric(name, "monitor")
    epochs = [{} if value is None else {metric.name: value} for value in values]
    assert Monitor(metric).best_epoch(epochs) == best
    since_best = 0 if best is None else len(values) - 1 - best
    assert not Monitor(metric).is_exhausted(epochs)
    assert not Monitor(metric, since_best + 1).is_exhausted(epochs)
    assert Monitor(metric, max(since_best, 1)).is_exhausted(epochs) == (since_best > 0)


def test_a_run_stops_early_and_trains_on_where_it_stopped(
    quick: list[str], tmp_path: Path, succeed: Printed, refuse: Printed
) -> None:
    """With a learning rate of nearly 0, no epoch is better than the first."""
    options = ("optimizer.lr=1e-30", "epochs=9", "patience=2", "hydra.run.dir=run")
    assert "stopped early: no epoch was better than epoch 1" in succeed(*quick, *HELD_OUT, *options)
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_early"], len(result["epochs"])) == ("completed", True, 3)
    for typed, total in (([], 9), (["epochs=12"], 12)):
        printed = succeed("resume=run", *typed)
        assert f"run: completed, epoch 3/{total}, eval_acc " in printed
        assert "; to continue, set resume=run patience=M" in printed
    assert result_of(tmp_path / "run") == result
    assert "epochs=1: the run has already started epoch 3" in refuse("resume=run", "epochs=1")
    succeed("resume=run", "patience=4", "epochs=5")
    assert [epoch["epoch"] for epoch in result_of(tmp_path / "run")["epochs"]] == list(range(5))
    assert "; to continue, set resume=run patience=M epochs=N" in succeed("resume=run")


def test_a_monitored_metric_that_is_not_measured_ends_the_run(quick: list[str], refuse: Printed) -> None:
    """Otherwise `patience` would end the run without a best epoch."""
    printed = refuse(*quick, *HELD_OUT, "monitor=gpu_peak_mib", "patience=2")
    assert "error: monitor=gpu_peak_mib: is not measured on this machine" in printed


def test_rank_0_decides_by_its_own_times(
    quick: list[str], tmp_path: Path, succeed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this rank, epochs get shorter; on rank 0, they get longer."""
    broadcast, times = World.broadcast_object, iter(range(1, 9))

    def of_rank_0(world: World, make: Callable[[], object], source: int = 0) -> object:
        value = broadcast(world, make, source)
        return {**value, "epoch_s": next(times)} if isinstance(value, dict) and "epoch_s" in value else value

    monkeypatch.setattr(World, "broadcast_object", of_rank_0)
    succeed(*quick, *HELD_OUT, "epochs=9", "monitor=epoch_s", "patience=2", "hydra.run.dir=run")
    assert [epoch["epoch_s"] for epoch in result_of(tmp_path / "run")["epochs"]] == [1, 2, 3]
    assert len(storage.read_checkpoint_file(tmp_path / "run" / "checkpoints" / "best.pt")["epochs"]) == 1


def test_validation_keeps_the_best_weights_to_be_tested(quick: list[str], tmp_path: Path, succeed: Printed) -> None:
    run = tmp_path / "run"
    output = succeed(*quick, *HELD_OUT, "optimizer.lr=0.05", "epochs=4", "monitor=loss", "hydra.run.dir=run")
    result = result_of(run)
    losses = [epoch["eval_loss"] for epoch in result["epochs"]]
    best = storage.read_checkpoint_file(run / "checkpoints" / "best.pt")
    assert len(best["epochs"]) == losses.index(min(losses)) + 1
    assert (result["eval_split"], result["test"]["weights"]) == ("validation", "best")
    evaluated = load_model(run, weights="best").evaluate("test").metrics
    assert {name: result["test"][f"test_{name}"] for name in evaluated} == pytest.approx(evaluated)
    with pytest.raises(DataError, match=r"best\.pt: has the weights of epoch \d, which is not"):
        storage.read_best_weights(run, 7)
    assert re.search(r"test split  loss .* \(best weights, of epoch \d\)", output)
    assert {"train", "validation", "test"} == {key.split("_")[0] for key in result["dataset"]["sha256"]}


def test_best_weights_that_a_kill_prevented_are_written_on_resuming(
    quick: list[str], tmp_path: Path, succeed: Printed, train_here: Train
) -> None:
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    succeed(*quick, *HELD_OUT, "epochs=1", "hydra.run.dir=run")
    best.unlink()
    train_here("resume=run", "epochs=2", "max_minutes=0")
    assert len(storage.read_checkpoint_file(best)["epochs"]) == 1


@pytest.mark.needs("POSIX signals")
def test_a_signal_stops_the_pass_over_the_test_split(
    quick: list[str], tmp_path: Path, succeed: Printed, train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **keywords: object) -> object:
        if signature(loop.evaluate).bind(*arguments, **keywords).arguments.get("split") == "test":
            os.kill(os.getpid(), signal.SIGTERM)
        return loop.evaluate(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", interrupted)
        assert train_here(*quick, *HELD_OUT, "hydra.run.dir=run").returncode == ExitCode.UNFINISHED
    stopped = result_of(tmp_path / "run")
    assert (stopped["status"], stopped["test"]) == ("interrupted", None)
    succeed("resume=run")
    result = result_of(tmp_path / "run")
    assert (result["status"], result["epochs"]) == ("completed", stopped["epochs"])
    assert result["test"]["test_acc"] >= 0


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [("eval_acc", math.nan, ""), ("eval_acc", math.inf, ""), ("eval_loss", math.inf, "; try a smaller optimizer.lr")],
)
def test_a_value_that_is_not_finite_ends_the_run(name: str, value: float, advice: str) -> None:
    """Otherwise the run could be neither resumed nor reported. A negative value is allowed."""
    metrics = {"eval_mcc": -0.03, "gpu_peak_mib": None}
    assert drop_non_finite({**metrics, "eval_x": math.nan}, "eval_acc", "epoch 1") == {**metrics, "eval_x": None}
    with pytest.raises(TrainingError, match=f"^epoch 1: {name} is {value}; it must be finite{advice}$"):
        drop_non_finite({**metrics, name: value}, "eval_acc", "epoch 1")


def test_a_metric_may_be_registered_late_but_not_with_the_name_of_another(add_members: AddMembers) -> None:
    assert "eval_late" not in build_epoch_table()
    late = Member(NoOptions, max, BatchMetricInfo(unit="%", tag="late", direction="max"))
    add_members(METRICS, late=late)
    assert {"train_late", "eval_late"} <= build_epoch_table().keys()
    with pytest.raises(ValueError, match="the tag verbose/eval_late, verbose/t"), METRICS.temporarily(other=late):
        build_epoch_table()
    add_members(METRICS, loss=Member(NoOptions, max, BatchMetricInfo(unit="%", tag="other", direction="max")))
    with pytest.raises(ValueError, match="two metrics have the name eval_loss, train_loss; choose another one"):
        build_epoch_table()
    with pytest.raises(ValueError, match="metrics: 'plain' needs info=, a BatchMetricInfo or "):
        METRICS.register("plain", info=MetricInfo(unit="%", tag="plain", direction="max"))
    with pytest.raises(ValueError, match="the options of 'plain' must derive from ScheduleOptions"):
        SCHEDULES.register("plain", NoOptions)
