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
from vitmnist.optim import SCHEDULES
from vitmnist.runtime.timer import EpochTimer
from vitmnist.training.loop import EpochProgress, evaluate, train_epoch
from vitmnist.training.step import TrainStep

CPU = torch.device("cpu")


def make_loader(tiny: Dataset, shuffle: Shuffle = Shuffle.sample) -> Loader:
    return LOADERS.build(LOADERS.complete({"name": "ram"}), tiny.train, EpochSampler(23, 5, 3, shuffle), CPU)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def make_step(model: nn.Module, tiny: Dataset, lr: float = 0.01) -> TrainStep:
    # Not Adam: on the CPU it reads its own step count, which never leaves the host.
    optimizer = torch.optim.SGD(model.parameters(), lr)
    schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
    return TrainStep(model, Preprocess(tiny.train), optimizer, schedule, batch_size=5)


def new_progress(loader: Loader, epoch: int = 0, log_every: int | None = None) -> EpochProgress:
    return EpochProgress(epoch, loader.sampler, CPU, log_every)


def train_one_epoch(model: nn.Module, tiny: Dataset, lr: float = 0.01) -> dict[str, float]:
    loader = make_loader(tiny)
    return train_epoch(make_step(model, tiny, lr), loader, new_progress(loader))


def test_an_epoch_is_the_hand_written_loop(tiny: Dataset) -> None:
    ours, theirs = make_model(), make_model()
    metrics = train_one_epoch(ours, tiny)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01)
    losses, correct = [], 0
    images = (tiny.train.images / 255 - tiny.train.mean[0]) / tiny.train.std[0]
    for indices in EpochSampler(23, 5, 3).batches(0):
        logits = theirs(images[indices])
        losses += F.cross_entropy(logits, tiny.train.labels[indices], reduction="none").tolist()
        correct += int((logits.argmax(1) == tiny.train.labels[indices]).sum())
        optimizer.zero_grad()
        F.cross_entropy(logits, tiny.train.labels[indices]).backward()
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert metrics["train_loss"] == pytest.approx(sum(losses) / 23, rel=1e-5)  # the short batch weighs 3, not 5
    assert metrics["train_acc"] == pytest.approx(100 * correct / 23)
    assert metrics["images_per_s"] == 23 / metrics["train_s"]


def test_evaluation_changes_nothing_and_counts_every_image(tiny: Dataset) -> None:
    model = make_model()
    model.append(nn.Dropout(0.9))
    before = copy.deepcopy(model.state_dict())
    metrics, _ = evaluate(model, make_loader(tiny, Shuffle.none), Preprocess(tiny.train))
    with torch.no_grad():
        logits = model.eval()(Preprocess(tiny.train)(tiny.train.images))
    assert metrics["eval_loss"] == pytest.approx(float(F.cross_entropy(logits, tiny.train.labels)), rel=1e-5)
    assert metrics["eval_acc"] == pytest.approx(100 * float((logits.argmax(1) == tiny.train.labels).double().mean()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_second_is_charged_to_its_phase(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only moves where the test says: 1 s a batch, 10 s a step, 100 s after each step."""
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
    loader = Slow(EpochSampler(23, 5, 3))
    for train in (True, False):
        model = make_model()
        model.register_forward_hook(lambda *_: spend(10))
        if train:
            metrics = train_epoch(make_step(model, tiny), loader, new_progress(loader), lambda timer: spend(100))
            assert [metrics[name] for name in ("data_wait_s", "compute_s", "train_s")] == [5, 50, 1555]
        else:
            metrics, _ = evaluate(model, loader, Preprocess(tiny.train), lambda timer: spend(100))
            assert metrics["eval_s"] == 1555


def test_the_phases_of_an_epoch_add_up_to_the_outside_clock(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real clock: 10 ms for each batch, 20 for its step, 30 for its save, 40 for the rest, 50 for the keys."""

    class Slow(Loader):
        def batches(self, number: int, start: int) -> Batches:
            for indices in self.sampler.batches(number, start):
                time.sleep(0.01)
                yield tiny.train.images[indices], tiny.train.labels[indices]

    def after_step(timer: EpochTimer) -> None:
        time.sleep(0.04)
        timer.begin("saving")
        time.sleep(0.03)
        progress.state_dict()
        timer.begin("other")

    def slow_keys(*arguments: object) -> Iterator[None]:
        time.sleep(0.05)
        return repeat(None)

    monkeypatch.setattr(Preprocess, "keys", slow_keys)
    model = make_model()
    model.register_forward_hook(lambda *_: time.sleep(0.02))
    loader, step = Slow(EpochSampler(23, 5, 3)), make_step(model, tiny)
    for _ in range(5):  # a busy machine may stop the process between the two clocks, but not each time
        progress = new_progress(loader)
        began = time.perf_counter()
        metrics = train_epoch(step, loader, progress, after_step)
        outside = time.perf_counter() - began
        other = metrics["train_s"] - metrics["data_wait_s"] - metrics["compute_s"]
        assert metrics["data_wait_s"] >= 5 * 0.01
        assert metrics["compute_s"] >= 5 * 0.02
        assert metrics["save_s"] >= 5 * 0.03
        assert other >= 5 * 0.04 + 0.05
        assert metrics["train_s"] <= outside - 5 * 0.03  # without the saves
        if metrics["train_s"] + metrics["save_s"] >= 0.99 * outside:
            return
    pytest.fail(f"{metrics} of {outside} s")


def test_a_restored_epoch_adds_to_its_seconds(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of an epoch that was saved, also after its end, as during evaluation."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def after_step(timer: EpochTimer) -> None:
        nonlocal now
        now += 1
        timer.begin("saving")
        now += 10
        timer.begin("other")

    loader = make_loader(tiny)
    progress, restored = new_progress(loader), new_progress(loader)
    train_epoch(make_step(make_model(), tiny), loader, progress, after_step)
    now += 1000
    restored.load_state_dict(progress.state_dict())
    metrics = train_epoch(make_step(make_model(), tiny), loader, restored, after_step)  # no batch is left
    assert (metrics["train_s"], metrics["save_s"]) == (5, 50)


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

    def after_step(timer: EpochTimer) -> None:
        nonlocal step
        step += 1

    model, loader, preprocess = make_model(), make_loader(tiny), Preprocess(tiny.train)
    training = make_step(model, tiny)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    train_epoch(training, loader, new_progress(loader), after_step)
    evaluate(model, loader, preprocess, after_step)
    # After the last step of a pass its metrics are read. Before that, only the loss on the CPU is checked for being
    # finite; a GPU is not asked (tests/gpu).
    inside = [read for read in reads if read[0] not in (len(loader), 2 * len(loader))]
    assert inside == [(number, "__bool__") for number in range(len(loader))][: len(inside)]
    assert len(inside) <= len(loader)


def test_a_loss_that_is_not_finite_names_its_step(tiny: Dataset) -> None:
    with pytest.raises(
        TrainingError,
        match=r"the loss is (nan|inf) in epoch 1, step [2-5], at learning rate 1e\+38; .*optimizer\.lr",
    ):
        train_one_epoch(make_model(), tiny, lr=1e38)


def test_an_exception_of_the_loader_comes_through(tiny: Dataset) -> None:
    class Broken(Loader):
        def batches(self, number: int, start: int):
            yield tiny.train.images[:5], tiny.train.labels[:5]
            raise OSError("the disk is gone")

    model = make_model()
    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(model, Broken(EpochSampler(23, 5, 3)), Preprocess(tiny.train))


@pytest.mark.parametrize("shuffle", Shuffle)
def test_the_set_is_never_written_to(tiny: Dataset, shuffle: Shuffle) -> None:
    """Contiguous batches are views of it."""
    before = tiny.train.images.clone(), tiny.train.labels.clone()
    model, loader, preprocess = make_model(), make_loader(tiny, shuffle), Preprocess(tiny.train)
    train_epoch(make_step(model, tiny), loader, new_progress(loader))
    evaluate(model, loader, preprocess)
    assert torch.equal(tiny.train.images, before[0])
    assert torch.equal(tiny.train.labels, before[1])


def test_predictions_are_those_of_the_split_in_its_order(tiny: Dataset) -> None:
    model = make_model()
    loader = make_loader(tiny, Shuffle.none)
    _, predictions = evaluate(model, loader, Preprocess(tiny.train))
    with torch.no_grad():
        probabilities = model(Preprocess(tiny.train)(tiny.train.images)).softmax(1)
    assert predictions.labels.equal(probabilities.argmax(1))
    torch.testing.assert_close(predictions.confidence, probabilities.amax(1))
    matrix = predictions.confusion_matrix(tiny.train.labels, 10)
    for actual in range(10):
        for predicted in range(10):
            both = (tiny.train.labels == actual) & (predictions.labels == predicted)
            assert matrix[actual, predicted] == both.sum()


def test_logged_steps_have_the_norm_of_their_gradients(tiny: Dataset) -> None:
    """Every third step of the run, in its second epoch of five steps: 6 and 9."""
    ours, theirs = make_model(), make_model()
    loader = make_loader(tiny)
    progress = new_progress(loader, epoch=1, log_every=3)
    train_epoch(make_step(ours, tiny), loader, progress)
    logged = progress.logged_steps()
    assert [step["step"] for step in logged] == [6, 9]
    expected = []
    for images, labels in make_loader(tiny).epoch(1):
        loss = F.cross_entropy(theirs(Preprocess(tiny.train)(images)), labels)
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        expected.append((loss.item(), norm.item()))
        with torch.no_grad():
            for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient)
    for step, (loss, norm) in zip(logged, (expected[1], expected[4]), strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert step["lr"] == 0.01
