"""The loop equals a hand-written loop, accounts for all its time, and never waits for the device within an epoch."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice, repeat
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import AddMembers
from vitmnist.augment.base import OPERATIONS
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.manager import CheckpointManager
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config, Shuffle
from vitmnist.config.validation import validate
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.metrics import METRICS, ProbabilityMetricInfo
from vitmnist.registry import Member, NoOptions
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS
from vitmnist.tracking.result import Result
from vitmnist.training.loop import evaluate, train_epoch
from vitmnist.training.model_runner import ModelRunner
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep

CPU = torch.device("cpu")
LOSS = partial(F.cross_entropy, reduction="sum")


def make_ram_loader(tiny: Dataset, shuffle: Shuffle = Shuffle.sample) -> Loader:
    return LOADERS.build({"name": "ram"}, tiny.train, EpochSampler(23, 5, 3, shuffle), CPU)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def make_sgd_step(model: nn.Module, tiny: Dataset, lr: float = 0.01, augment: Compose | None = None) -> TrainStep:
    # Not Adam: on the CPU, it reads its step count from a tensor.
    optimizer = torch.optim.SGD(model.parameters(), lr)
    runner = ModelRunner(model, Preprocess(tiny.train, augment), LOSS, batch_size=5)
    return TrainStep(runner, optimizer, lambda step: 1.0)


def normalized(data: Dataset) -> torch.Tensor:
    return (data.train.images / 255 - data.train.mean[0]) / data.train.std[0]


def new_progress(loader: Loader, epoch: int = 0, log_every: int | None = None) -> EpochProgress:
    return EpochProgress(epoch, loader.sampler, CPU, log_every)


@pytest.mark.parametrize(("num_batches", "message"), [(4, "is shorter"), (6, "is longer")])
@pytest.mark.parametrize("augment", [None, Compose([{"name": "shift"}])], ids=["plain", "augmented"])
def test_an_epoch_with_too_few_or_too_many_batches_is_an_error(
    tiny: Dataset, augment: Compose | None, num_batches: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, model = make_ram_loader(tiny), make_model()
    epoch = loader.epoch
    monkeypatch.setattr(loader, "epoch", lambda *arguments: islice(cycle(epoch(*arguments)), num_batches))
    with pytest.raises(ValueError, match=message):
        train_epoch(make_sgd_step(model, tiny, augment=augment), loader, new_progress(loader))
    with pytest.raises(ValueError, match=message):
        evaluate(model, loader, Preprocess(tiny.train))


def test_an_epoch_equals_the_hand_written_loop(tiny: Dataset) -> None:
    """This includes weights, metrics and logged steps: every third of the run, here 6 and 9 in the second epoch."""
    ours, theirs, loader = make_model(), make_model(), make_ram_loader(tiny)
    progress = new_progress(loader, epoch=1, log_every=3)
    with patch.object(EpochSampler, "draw_order", autospec=True, side_effect=EpochSampler.draw_order) as draw_order:
        metrics = train_epoch(make_sgd_step(ours, tiny), loader, progress)
        loader.sampler.sample_ids(2)
    assert [epoch for (_, epoch), _ in draw_order.call_args_list] == [1, 2], "once each, and the next one ahead"
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01)
    losses, correct, steps = [], 0, []
    images = normalized(tiny)
    for indices in EpochSampler(23, 5, 3).batch_indices(1):
        logits = theirs(images[indices])
        losses += F.cross_entropy(logits, tiny.train.labels[indices], reduction="none").tolist()
        correct += int((logits.argmax(1) == tiny.train.labels[indices]).sum())
        optimizer.zero_grad()
        loss = F.cross_entropy(logits, tiny.train.labels[indices])
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in theirs.parameters()]).norm()
        steps.append({"step": 5 + len(steps), "loss": float(loss.detach()), "lr": 0.01, "grad_norm": float(norm)})
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert metrics["train_loss"] == pytest.approx(sum(losses) / 23, rel=1e-5)  # The short batch has weight 3, not 5.
    assert metrics["train_acc"] == pytest.approx(100 * correct / 23)
    assert metrics["images_per_s"] == 23 / metrics["train_s"]
    for logged, expected in zip(progress.logged_steps(), (steps[1], steps[4]), strict=True):
        assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shuffle", [Shuffle.sample, Shuffle.batch, Shuffle.none])
def test_evaluation_counts_every_image_and_changes_nothing(tiny: Dataset, shuffle: Shuffle) -> None:
    """Model and dataset stay unchanged, although batches can be views of the dataset. Predictions are in its order."""
    model = make_model()
    model.append(nn.Dropout(0.9))
    before = copy.deepcopy((model.state_dict(), tiny.train.images, tiny.train.labels))
    loader = make_ram_loader(tiny, shuffle)
    evaluation = evaluate(model, loader, Preprocess(tiny.train))
    metrics, predictions = evaluation.metrics, evaluation.predictions
    with torch.no_grad():
        logits = model.eval()(normalized(tiny))
    assert metrics["eval_loss"] == pytest.approx(float(F.cross_entropy(logits, tiny.train.labels)), rel=1e-5)
    assert metrics["eval_acc"] == pytest.approx(100 * float((logits.argmax(1) == tiny.train.labels).double().mean()))
    if shuffle == Shuffle.none:
        assert predictions.predicted.equal(logits.argmax(1))
        torch.testing.assert_close(predictions.confidence, logits.softmax(1).amax(1))
        pairs = list(zip(tiny.train.labels.tolist(), predictions.predicted.tolist(), strict=True))
        expected = [[pairs.count((actual, predicted)) for predicted in range(10)] for actual in range(10)]
        assert predictions.confusion_matrix().tolist() == expected
    train_epoch(make_sgd_step(make_model(), tiny), loader, new_progress(loader))
    after = (model.state_dict(), tiny.train.images, tiny.train.labels)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_metric_gets_the_probabilities_and_the_labels_of_all_images(tiny: Dataset, add_members: AddMembers) -> None:
    info = ProbabilityMetricInfo(unit="%", tag="nll", direction="min")
    add_members(METRICS, nll=Member(NoOptions, lambda p, labels: F.nll_loss(p.log(), labels), info))
    metrics = evaluate(make_model(), make_ram_loader(tiny), Preprocess(tiny.train)).metrics
    assert metrics["eval_nll"] == pytest.approx(100 * metrics["eval_loss"], rel=1e-5)


def test_every_second_is_charged_to_its_phase(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test controls the clock. A restored epoch keeps its seconds."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Slow(Loader):
        def batches(self, epoch: int, start: int) -> Batches:
            for indices in [*self.sampler.batch_indices(epoch, start)]:
                spend(1)
                yield tiny.train.images[indices], tiny.train.labels[indices]
            spend(1000)

    def after_step(timer: EpochTimer) -> None:
        spend(100)
        timer.begin("saving")
        spend(30)
        timer.begin("other")

    def slow_keys(*arguments: object) -> Iterator[None]:
        spend(500)
        return repeat(None)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(Preprocess, "random_keys", slow_keys)
    loader, model = Slow(EpochSampler(23, 5, 3)), make_model()
    model.register_forward_hook(lambda *_: spend(10))
    names = ("first_batch_s", "data_wait_s", "compute_s", "save_s", "train_s")
    progress, restored = new_progress(loader), new_progress(loader)
    metrics = train_epoch(make_sgd_step(model, tiny), loader, progress, after_step)
    assert [metrics[name] for name in names] == [1, 5, 50, 150, 2055]
    assert metrics["train_s"] + metrics["save_s"] == now
    spend(10_000)
    restored.load_state_dict(progress.state_dict())
    metrics = train_epoch(make_sgd_step(model, tiny), loader, restored, after_step)  # No batch is left.
    assert [metrics[name] for name in names] == [1, 5, 50, 150, 2055 + 1500]
    evaluation = evaluate(model, loader, Preprocess(tiny.train), after_step)
    assert (evaluation.metrics["eval_s"], evaluation.save_s) == (1555, 150)


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways in which Python has read the value of a tensor since the test began. A GPU would wait for each."""
    names: list[str] = []

    def watched(name: str) -> Callable[..., object]:
        original = getattr(torch.Tensor, name)
        return lambda tensor, *arguments: names.append(name) or original(tensor, *arguments)

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    return names


@pytest.mark.parametrize("operation", OPERATIONS.members())
def test_nothing_is_read_back_inside_an_epoch(operation: str, tiny: Dataset, reads: list[str]) -> None:
    model, loader, counts = make_model(), make_ram_loader(tiny), []
    step = make_sgd_step(model, tiny, augment=Compose([{"name": operation}]))
    reads.clear()
    train_epoch(step, loader, new_progress(loader), lambda timer: counts.append(len(reads)))
    evaluate(model, loader, step.preprocess, lambda timer: counts.append(len(reads)))
    assert counts == len(loader) * [0] + len(loader) * [counts[-1]]
    assert 0 < counts[-1] < len(reads)


def test_a_save_waits_for_the_device_once(tiny: Dataset, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A single read checks that all weights are finite; writing the file then copies them."""
    monkeypatch.setattr(storage, "write_checkpoint", lambda *arguments: None)
    result, step = Result(folder=Path(), dataset={"sha256": {}}), make_sgd_step(make_model(), tiny)
    config = validate(Config, compose([]))
    checkpoints = CheckpointManager(config, tiny, step, result, StopSignal(), SINGLE_PROCESS, list)
    reads.clear()
    checkpoints.save(None)
    assert reads == ["__bool__"]
