"""The loop computes what a hand-written one computes, times it fully, and leaves the device to work."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import TrainingError
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.timer import EpochTimer
from vitmnist.training import loop
from vitmnist.training.step import Gradient, Step

CPU = torch.device("cpu")


def make_loader(tiny: Dataset, shuffle: Shuffle = Shuffle.sample) -> Loader:
    return LOADERS.build(LOADERS.complete({"name": "ram"}), tiny.train, EpochSampler(23, 5, 3, shuffle), CPU)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def make_step(model: nn.Module, tiny: Dataset, lr: float = 0.01) -> Step:
    # Not Adam: on the CPU it reads its own step count, which never leaves the host.
    optimizer = torch.optim.SGD(model.parameters(), lr)
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
    return Step(Gradient(model, Preprocess(tiny.train), batch_size=5), optimizer, schedule)


def train_epoch(model: nn.Module, tiny: Dataset, lr: float = 0.01) -> loop.PassFigures:
    loader = make_loader(tiny)
    current = loop.TrainingPass(0, len(loader), CPU)
    return loop.train_epoch(make_step(model, tiny, lr), loader, current, CPU)


def test_an_epoch_is_the_hand_written_loop(tiny: Dataset) -> None:
    ours, theirs = make_model(), make_model()
    figures = train_epoch(ours, tiny)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01)
    losses, right = [], 0
    images = (tiny.train.images / 255 - tiny.train.mean[0]) / tiny.train.std[0]
    for indices in EpochSampler(23, 5, 3).batches(0):
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
    figures, _ = loop.evaluate(model, make_loader(tiny, Shuffle.none), Preprocess(tiny.train), CPU)
    with torch.no_grad():
        logits = model.eval()(Preprocess(tiny.train)(tiny.train.images))
    assert figures.loss == pytest.approx(float(F.cross_entropy(logits, tiny.train.labels)), rel=1e-5)
    assert figures.accuracy == pytest.approx(100 * float((logits.argmax(1) == tiny.train.labels).double().mean()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_second_goes_to_its_account(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only moves where the test says: 1 s a batch, 10 s a step, 100 s for the progress bar."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Slow(Loader):
        def batches(self, number: int, start: int) -> Batches:
            for indices in self.sampler.batches(number, start):
                spend(1)
                yield tiny.train.images[indices], tiny.train.labels[indices]
            spend(1000)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    model = make_model()
    model.register_forward_hook(lambda *_: spend(10))
    loader = Slow(EpochSampler(23, 5, 3))
    figures, _ = loop.evaluate(model, loader, Preprocess(tiny.train), CPU, lambda timer: spend(100))
    assert (figures.data_wait_s, figures.compute_s, figures.seconds) == (5, 50, 1555)


def test_the_phases_of_an_epoch_add_up_to_the_outside_clock(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real clock: 10 ms for each batch, 20 for its step, 30 for its save, 40 for the rest, 50 for the keys."""

    class Slow(Loader):
        def batches(self, number: int, start: int) -> Batches:
            for indices in self.sampler.batches(number, start):
                time.sleep(0.01)
                yield tiny.train.images[indices], tiny.train.labels[indices]

    def advance(timer: EpochTimer) -> None:
        time.sleep(0.04)
        timer.begin("saving")
        time.sleep(0.03)
        current.state_dict()
        timer.begin("other")

    def slow_keys(*arguments: object) -> Iterator[None]:
        time.sleep(0.05)
        return repeat(None)

    monkeypatch.setattr(Preprocess, "keys", slow_keys)
    model = make_model()
    model.register_forward_hook(lambda *_: time.sleep(0.02))
    loader, step = Slow(EpochSampler(23, 5, 3)), make_step(model, tiny)
    for _ in range(5):  # a busy machine may stop the process between the two clocks, but not each time
        current = loop.TrainingPass(0, 5, CPU)
        began = time.perf_counter()
        figures = loop.train_epoch(step, loader, current, CPU, advance)
        outside = time.perf_counter() - began
        other = figures.seconds - figures.data_wait_s - figures.compute_s
        assert figures.data_wait_s >= 5 * 0.01
        assert figures.compute_s >= 5 * 0.02
        assert figures.save_s >= 5 * 0.03
        assert other >= 5 * 0.04 + 0.05
        assert figures.seconds <= outside - 5 * 0.03  # without the saves
        if figures.seconds + figures.save_s >= 0.99 * outside:
            return
    pytest.fail(f"{figures} of {outside} s")


def test_a_pass_that_is_saved_after_its_end_keeps_its_time(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """As during evaluation; and a pass that goes on adds to the seconds of the checkpoint, those it has."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def advance(timer: EpochTimer) -> None:
        nonlocal now
        now += 1
        timer.begin("saving")
        now += 10
        timer.begin("other")

    loader, current = make_loader(tiny), loop.TrainingPass(0, 5, CPU)
    loop.train_epoch(make_step(make_model(), tiny), loader, current, CPU, advance)
    now += 1000
    state = current.state_dict()
    assert state["seconds"] == {"seconds": 5, "waiting": 0, "computing": 0, "saving": 50}
    for older in (state["seconds"], {"seconds": 5, "waiting": 0, "computing": 0}):
        again = loop.TrainingPass(0, 5, CPU)
        again.load_state_dict({**state, "seconds": older})
        figures = loop.train_epoch(make_step(make_model(), tiny), loader, again, CPU, advance)
        assert (figures.seconds, figures.save_s) == (5, older.get("saving", 0))


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def test_nothing_is_read_back_inside_an_epoch(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in which Python can ask a tensor for its value is watched, and each read noted with its step."""
    reads: list[tuple[int, str]] = []
    step = 0

    def watched(name: str) -> Callable[..., object]:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: object) -> object:
            reads.append((step, name))
            return original(tensor, *arguments)

        return read

    def advance(timer: EpochTimer) -> None:
        nonlocal step
        step += 1

    model, loader, preprocess = make_model(), make_loader(tiny), Preprocess(tiny.train)
    training = make_step(model, tiny)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    current = loop.TrainingPass(0, len(loader), CPU)
    loop.train_epoch(training, loader, current, CPU, advance)
    loop.evaluate(model, loader, preprocess, CPU, advance)
    # After the last step of a pass its figures are read. Before that, only on the CPU, whether the loss is finite: a
    # GPU is not asked (tests/test_gpu.py).
    inside = [read for read in reads if read[0] not in (len(loader), 2 * len(loader))]
    assert inside == [(number, "__bool__") for number in range(len(loader))][: len(inside)]
    assert len(inside) <= len(loader)


def test_a_loss_that_is_not_finite_names_its_step(tiny: Dataset) -> None:
    with pytest.raises(
        TrainingError,
        match=r"the loss is (nan|inf) in epoch 1, step [2-5], at learning rate 1e\+38; .*optimizer\.lr",
    ):
        train_epoch(make_model(), tiny, lr=1e38)


def test_an_exception_of_the_loader_comes_through(tiny: Dataset) -> None:
    class Broken(Loader):
        def batches(self, number: int, start: int):
            yield tiny.train.images[:5], tiny.train.labels[:5]
            raise OSError("the disk is gone")

    model = make_model()
    with pytest.raises(OSError, match="the disk is gone"):
        loop.evaluate(model, Broken(EpochSampler(23, 5, 3)), Preprocess(tiny.train), CPU)


@pytest.mark.parametrize("shuffle", Shuffle)
def test_the_set_is_never_written_to(tiny: Dataset, shuffle: Shuffle) -> None:
    """Contiguous batches are views of it."""
    before = tiny.train.images.clone(), tiny.train.labels.clone()
    model, loader, preprocess = make_model(), make_loader(tiny, shuffle), Preprocess(tiny.train)
    current = loop.TrainingPass(0, len(loader), CPU)
    loop.train_epoch(make_step(model, tiny), loader, current, CPU)
    loop.evaluate(model, loader, preprocess, CPU)
    assert torch.equal(tiny.train.images, before[0])
    assert torch.equal(tiny.train.labels, before[1])


def test_predictions_are_those_of_the_split_in_its_order(tiny: Dataset) -> None:
    model = make_model()
    loader = make_loader(tiny, Shuffle.none)
    _, predictions = loop.evaluate(model, loader, Preprocess(tiny.train), CPU)
    with torch.no_grad():
        probabilities = model(Preprocess(tiny.train)(tiny.train.images)).softmax(1)
    assert predictions.labels.equal(probabilities.argmax(1))
    torch.testing.assert_close(predictions.confidence, probabilities.amax(1))
    matrix = predictions.confusion_matrix(tiny.train.labels, 10)
    for actual in range(10):
        for taken_for in range(10):
            both = (tiny.train.labels == actual) & (predictions.labels == taken_for)
            assert matrix[actual, taken_for] == both.sum()


def test_watched_steps_have_the_norm_of_their_gradients(tiny: Dataset) -> None:
    """Every third step of the run, in its second epoch of five steps: 6 and 9."""
    ours, theirs = make_model(), make_model()
    loader = make_loader(tiny)
    current = loop.TrainingPass(1, len(loader), CPU, watch_every=3)
    loop.train_epoch(make_step(ours, tiny), loader, current, CPU)
    watched = current.watched()
    assert [figures.step for figures in watched] == [6, 9]
    expected = []
    for images, labels in make_loader(tiny).epoch(1):
        loss = F.cross_entropy(theirs(Preprocess(tiny.train)(images)), labels)
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        expected.append((loss.item(), norm.item()))
        with torch.no_grad():
            for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient)
    for figures, (loss, norm) in zip(watched, (expected[1], expected[4]), strict=True):
        assert figures.loss == pytest.approx(loss, rel=1e-5)
        assert figures.grad_norm == pytest.approx(norm, rel=1e-5)
        assert figures.lr == 0.01
