"""A captured step is the eager step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.training.test_step import CPU, CUTMIX, MIXUP, SHIFT, check_same_weights, make_loader, make_step, train
from vitmnist.augment.compose import Compose
from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import UnsupportedStepError
from vitmnist.runtime.backend import CpuBackend
from vitmnist.training.cuda_graph import capture_step
from vitmnist.training.loop import EpochProgress, train_epoch


@pytest.mark.parametrize(
    ("loader", "shuffle", "optimizer", "decay", "augment"),
    [
        ("ram", Shuffle.sample, "adam", None, SHIFT),
        ("ram", Shuffle.sample, "sgd", 0.9, MIXUP),
        ("gpu_slice", Shuffle.sample, "adamw", 0.9, SHIFT),
        ("gpu_slice", Shuffle.sample, "adam", None, CUTMIX),
        ("gpu_slice", Shuffle.batch, "sgd", None, SHIFT),
        ("disk", Shuffle.sample, "adamw", None, SHIFT),
        ("disk", Shuffle.sample, "adam", 0.9, MIXUP),
    ],
    ids=lambda value: "" if isinstance(value, Compose) else str(value),
)
def test_replay_is_the_eager_step_over_a_changing_learning_rate(
    tiny: Dataset, loader: str, shuffle: Shuffle, optimizer: str, decay: float | None, augment: Compose
) -> None:
    """Three epochs of a whole cycle, captured after the first; behind a short last batch, the graph finds the images
    and keys of the batch before.
    """
    eager, captured = (make_step(tiny, optimizer, decay=decay, augment=augment) for _ in range(2))
    batches = make_loader(tiny, loader, shuffle)
    expected = train(eager, batches)
    metrics = train(captured, batches, epochs=1)
    capture_step(captured, batches, CpuBackend(CPU))
    progress = EpochProgress(1, batches.sampler, CPU, log_every=2)
    metrics += [train_epoch(captured, batches, progress), *train(captured, batches, epochs=1, first=2)]
    assert [one["train_loss"] for one in metrics] == pytest.approx([one["train_loss"] for one in expected], rel=1e-4)
    assert [one["train_acc"] for one in metrics] == [one["train_acc"] for one in expected]
    check_same_weights(captured.model, eager.model)
    check_same_weights(captured.eval_model, eager.eval_model)
    assert captured.lr == eager.lr
    assert captured.optimizer.state_dict()["param_groups"] == eager.optimizer.state_dict()["param_groups"]
    logged = progress.logged_steps()
    assert len({step["lr"] for step in logged}) == len(logged) > 0


@pytest.mark.parametrize("trained", [0, 1], ids=["before the first step", "after an epoch"])
def test_capturing_changes_nothing(tiny: Dataset, trained: int) -> None:
    step, batches = make_step(tiny, decay=0.9), make_loader(tiny, "gpu_slice")
    train(step, batches, trained)

    def state() -> list[Tensor]:
        models = [*step.model.state_dict().values(), *step.eval_model.state_dict().values()]
        states = step.optimizer.state_dict()["state"].values()
        return [value.clone() for value in (*models, *(value for state in states for value in state.values()))]

    before, lr = state(), step.lr
    capture_step(step, batches, CpuBackend(CPU))
    after = state()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=trained > 0))
    assert all(not value.any() for value in after[len(before) :])  # the state of an optimizer that has seen no step
    assert step.lr == lr


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("CUDA is full")])
def test_a_step_that_cannot_be_captured_stays_as_it_was(tiny: Dataset, error: Exception) -> None:
    class FailingCapture(CpuBackend):
        def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
            super().capture(work, warm_up)
            raise error

    step, eager, batches = make_step(tiny, decay=0.9), make_step(tiny, decay=0.9), make_loader(tiny, "gpu_slice")
    with pytest.raises(UnsupportedStepError, match=str(error)):
        capture_step(step, batches, FailingCapture(CPU))
    assert not step.pad
    for one in (step, eager):
        train(one, batches)
    check_same_weights(step.model, eager.model)
    check_same_weights(step.eval_model, eager.eval_model)
