"""The progress of an epoch survives a save, by any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.world import World
from vitmnist.training.progress import EpochProgress, MetricAccumulator

CPU = torch.device("cpu")
SAMPLER = EpochSampler(23, 8, 3)  # Batches of 8, 8 and 7 images


def record(progress: EpochProgress, *batches: int) -> None:
    for batch in batches:
        step = SimpleNamespace(lr=0.1 / batch, gradient_norm=lambda: torch.tensor(2.0))
        progress.record_step(step, {"loss": torch.tensor(8.0 * batch), "acc": torch.tensor(batch)})


def test_a_resumed_epoch_continues_from_its_state() -> None:
    whole, cut, resumed = (EpochProgress(1, SAMPLER, CPU, log_every=2) for _ in range(3))
    record(whole, 1, 2, 3)
    record(cut, 1, 2)
    resumed.load_state_dict(cut.state_dict())
    record(resumed, 3)
    assert resumed.num_batches == 3
    assert resumed.accumulator.compute() == whole.accumulator.compute()
    assert resumed.accumulator.compute() == {"loss": pytest.approx(48 / 23), "acc": pytest.approx(600 / 23)}
    assert resumed.logged_steps() == whole.logged_steps()
    assert [(step["step"], step["loss"]) for step in whole.logged_steps()] == [(4, pytest.approx(2.0))]


def test_a_state_of_all_ranks_is_counted_once() -> None:
    saved = MetricAccumulator(SAMPLER, CPU)
    saved.update({"loss": torch.tensor(5.0), "acc": torch.tensor(3)})
    worlds = World(), World()  # Each reduces to its own sums, which the test adds up.
    worlds[1].rank = 1
    ranks = [MetricAccumulator(SAMPLER, CPU, world) for world in worlds]
    for accumulator in ranks:
        accumulator.load_state_dict(saved.state_dict())
        accumulator.update({"loss": torch.tensor(2.0), "acc": torch.tensor(1)})
    first, second = (accumulator.state_dict()["sums"] for accumulator in ranks)
    assert (first["loss"] + second["loss"]).tolist() == [5, 4, 0]
    assert (first["acc"] + second["acc"]).tolist() == [3, 2, 0]
