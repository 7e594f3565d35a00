"""The loop computes what a hand-written one computes, times it fully, and leaves the device to work."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitmnist import engine
from vitmnist.clock import StepClock
from vitmnist.config import Shuffle
from vitmnist.data.dataset import Dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import TrainingError
from vitmnist.schedule import SCHEDULES

CPU = torch.device("cpu")


def make_loader(tiny: Dataset, shuffle: Shuffle = Shuffle.sample) -> Loader:
    return LOADERS.build({"name": "ram"}, tiny.train, EpochOrder(23, 5, 3, shuffle), CPU)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def train_epoch(model: nn.Module, tiny: Dataset, lr: float = 0.01) -> engine.PassFigures:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
    arguments = (optimizer, schedule, CPU, lambda: None)
    return engine.train_epoch(model, make_loader(tiny), 0, Preprocess(tiny.train), *arguments)


def test_an_epoch_is_the_hand_written_loop(tiny: Dataset) -> None:
    ours, theirs = make_model(), make_model()
    figures = train_epoch(ours, tiny)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01)
    losses, right = [], 0
    images = (tiny.train.images / 255 - tiny.train.mean[0]) / tiny.train.std[0]
    for indices in EpochOrder(23, 5, 3).batches(0):
        logits = theirs(images[indices])
        losses += F.cross_entropy(logits, tiny.train.labels[indices], reduction="none").tolist()
        right += int((logits.argmax(1) == tiny.train.labels[indices]).sum())
        optimizer.zero_grad()
        F.cross_entropy(logits, tiny.train.labels[indices]).backward()
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert figures.images == 23
    assert figures.loss == pytest.approx(sum(losses) / 23, rel=1e-5)  # the short batch weighs 3, not 5
    assert figures.accuracy == pytest.approx(100 * right / 23)


def test_evaluation_changes_nothing_and_counts_every_image(tiny: Dataset) -> None:
    model = make_model()
    model.append(nn.Dropout(0.9))
    before = copy.deepcopy(model.state_dict())
    figures = engine.evaluate(model, make_loader(tiny, Shuffle.none), Preprocess(tiny.train), CPU, lambda: None)
    with torch.no_grad():
        logits = model.eval()(Preprocess(tiny.train)(tiny.train.images))
    assert figures.loss == pytest.approx(float(F.cross_entropy(logits, tiny.train.labels)), rel=1e-5)
    assert figures.accuracy == pytest.approx(100 * float((logits.argmax(1) == tiny.train.labels).double().mean()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_times_fit_into_the_pass(tiny: Dataset) -> None:
    figures = train_epoch(make_model(), tiny)
    assert figures.data_wait_s > 0
    assert figures.compute_s > 0
    assert figures.data_wait_s + figures.compute_s <= figures.seconds


class CountReads(TorchDispatchMode):
    """Counts the operations by which a value leaves the device."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Counter[int] = Counter()
        self.step = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.steps[self.step] += 1
        return func(*args, **(kwargs or {}))

    def advance(self) -> None:
        self.step += 1


def test_nothing_is_read_back_inside_an_epoch(tiny: Dataset) -> None:
    model = make_model()
    # Not Adam: on the CPU it reads its own step count, which never leaves the host.
    optimizer = torch.optim.SGD(model.parameters())
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
    loader, preprocess = make_loader(tiny), Preprocess(tiny.train)
    with CountReads() as reads:
        engine.train_epoch(model, loader, 0, preprocess, optimizer, schedule, CPU, reads.advance)
        assert set(reads.steps) == {len(loader)}  # after the last step the figures are read, and only then
        reads.step = 0
        reads.steps.clear()
        engine.evaluate(model, loader, preprocess, CPU, reads.advance)
    assert set(reads.steps) == {len(loader)}


def test_a_loss_that_is_not_finite_names_its_step(tiny: Dataset) -> None:
    with pytest.raises(
        TrainingError,
        match=r"the loss is (nan|inf) in epoch 0, step [1-4], at learning rate 1e\+38; .*optimizer\.lr",
    ):
        train_epoch(make_model(), tiny, lr=1e38)
    model = make_model()
    nn.init.constant_(model[1].weight, float("nan"))
    with pytest.raises(TrainingError, match="the validation loss is nan in batch 0"):
        engine.evaluate(model, make_loader(tiny), Preprocess(tiny.train), CPU, lambda: None)


def test_an_exception_of_the_loader_comes_through(tiny: Dataset) -> None:
    class Broken(Loader):
        def batches(self, number: int, start: int):
            yield tiny.train.images[:5], tiny.train.labels[:5]
            raise OSError("the disk is gone")

    model = make_model()
    with pytest.raises(OSError, match="the disk is gone"):
        engine.evaluate(model, Broken(EpochOrder(23, 5, 3)), Preprocess(tiny.train), CPU, lambda: None)


def test_the_clock_keeps_two_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 1.0, 1.5, 3.5, 4.0])
    monkeypatch.setattr("vitmnist.clock.time.perf_counter", lambda: next(readings))
    clock = StepClock(CPU)
    for _ in range(2):
        clock.data_ready()
        clock.step_done()
    assert clock.read() == (3.0, 1.0)
