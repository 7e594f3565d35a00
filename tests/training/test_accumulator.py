"""A metric of a batch is one file: it is recorded, resumed, compiled and reported without another change."""

from __future__ import annotations

import math

import pytest
import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, TrainingError
from vitmnist.metrics import METRICS, BatchMetric
from vitmnist.tracking.epoch_table import epoch_metrics, epoch_record
from vitmnist.training.loop import MetricAccumulator


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
def test_a_metric_does_not_take_the_name_of_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._registered, name, (BatchMetric("%", tag="other"), max))
    with pytest.raises(ValueError, match=f"two metrics are called eval_{name}, train_{name}; choose another name"):
        epoch_metrics.__wrapped__()
