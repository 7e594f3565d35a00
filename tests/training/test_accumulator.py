"""A metric of a batch is one file: it is recorded, resumed, compiled and reported without another change."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import REPOSITORY, result_of
from tests.support.pages import blocks
from tests.support.processes import TrainProcess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, TrainingError
from vitmnist.metrics.base import METRICS
from vitmnist.tracking.epoch_table import epoch_metrics, epoch_record
from vitmnist.training.accumulator import MetricAccumulator


def train(*arguments: str) -> int:
    from vitmnist.cli.train import main

    sys.argv = ["train.py", *arguments]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def train_with_top5() -> None:
    """A sweep of one job; then a run that is compiled, in microbatches, stopped in mid-epoch and resumed."""
    quick = sys.argv[1:]
    for module in [module for module in sys.modules if module.partition(".")[0] in ("vitmnist", "hydra_plugins")]:
        del sys.modules[module]
    from vitmnist.metrics.base import METRICS

    if "top5" not in METRICS.names():  # it is in a copy with the examples of the documentation
        exec(Path("top5.py").read_text())  # as importing it from vitmnist/metrics does

    train(*quick, "-m", "hydra.sweep.dir=whole")
    torch.compile = partial(torch.compile, backend="eager")  # traces as always, but generates no code
    options = ("trainer.compile=true", "trainer.fused=true", "trainer.micro_batch=4")
    assert train(*quick, *options, "hydra.run.dir=stopped", "max_minutes=0")
    sys.exit(train("resume=stopped", "max_minutes=null"))


def test_the_documented_metric_is_recorded_everywhere(quick: list[str], tmp_path: Path) -> None:
    (metric,) = (one for one in blocks("python", REPOSITORY / "docs" / "architecture.md") if "vitmnist/metrics/" in one)
    (tmp_path / "top5.py").write_text(metric)
    code, output = TrainProcess(tmp_path, *quick, before=train_with_top5).ended()
    assert code == 0, output
    (whole,) = (path.parent for path in (tmp_path / "whole").glob("*/result.json"))
    stopped = tmp_path / "stopped"
    assert result_of(stopped)["trainer"]["compile"] is True
    for epoch, expected in zip(*(result_of(folder)["epochs"] for folder in (stopped, whole)), strict=True):
        for split in ("train", "eval"):
            assert 0 <= epoch[f"{split}_acc"] < epoch[f"{split}_top5"] < 100
            assert epoch[f"{split}_top5"] == expected[f"{split}_top5"]
    header, *_ = (stopped / "epochs.csv").read_text().splitlines()
    assert {"train_top5", "eval_top5"} <= set(next(csv.reader([header])))
    (events,) = whole.glob("events.out.tfevents.*")
    tags = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"train/top5", "eval/top5", "summary/eval_top5_last"} <= set(tags)
    report = (tmp_path / "whole" / "report.md").read_text()
    last = result_of(whole)["epochs"][-1]["eval_top5"]
    assert re.search(rf"\| +top-5 accuracy, % .*\n.*\n.*\b{last:.2f}\b", report), report


def test_an_epoch_is_not_resumed_with_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, device = EpochSampler(10, 4, 0), torch.device("cpu")
    state = MetricAccumulator(sampler, device).state_dict()
    monkeypatch.setitem(METRICS._registered, "another", METRICS._registered["acc"])
    with pytest.raises(
        DataError, match=r"with other metrics: another; resume it with the same files in vitmnist/metrics"
    ):
        MetricAccumulator(sampler, device).load_state_dict(state)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_value_that_no_record_may_have_ends_the_run(value: float) -> None:
    """Or the run could be neither resumed nor reported."""
    metrics = {metric.name: 1.0 for metric in epoch_metrics().values()} | {"eval_acc": value}
    with pytest.raises(TrainingError, match=f"epoch 1: eval_acc is {value}; it must be finite and not negative"):
        epoch_record(0, metrics, [], first_of_start=True)


@pytest.mark.parametrize("name", ["loss", "s"])
def test_a_metric_does_not_take_the_name_of_another(name: str) -> None:
    code = (
        "from vitmnist.metrics.base import METRICS, BatchMetric\n"
        f"METRICS.register({name!r}, BatchMetric('%', tag='other'))(max)\n"
        "from vitmnist.tracking.epoch_table import epoch_metrics\nepoch_metrics()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"two metrics are called eval_{name}, train_{name}; choose another name" in process.stderr
