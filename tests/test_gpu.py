"""What only a GPU can show; `pytest -m gpu -n0` where there is one, in one process: its memory is nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training import test_step
from vitmnist import make_loader
from vitmnist.config.schema import Precision, Shuffle
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import Loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.device import accelerator_of
from vitmnist.runtime.memory import DoesNotFitError, free_memory, peak_memory
from vitmnist.runtime.timer import EpochTimer
from vitmnist.testing import PROMISES, Case
from vitmnist.tracking.hardware import HardwareFigures
from vitmnist.training.cuda_graph import capture_step
from vitmnist.training.loop import EpochProgress, train_epoch
from vitmnist.training.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
LOADER_OPTIONS = {
    "disk": {"num_workers": 2},
    "ram": {},
    "gpu_slice": {},
    "cache": {},
    "prefetch of ram": {"base": "ram"},
    "prefetch of gpu_slice": {"base": "gpu_slice"},
    "prefetch of disk": {"base": "disk"},
}


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("label", LOADER_OPTIONS)
def test_contract_on_the_gpu(label: str, promise: Callable[[Case], None], tiny: Dataset, tmp_path: Path) -> None:
    name = label.partition(" ")[0]
    folder = {"folder": str(tmp_path)} if name == "cache" else {}
    promise(Case(name, tiny.train, "cuda", {**LOADER_OPTIONS[label], **folder}))


@pytest.mark.parametrize("label", LOADER_OPTIONS)
def test_images_normalised_on_the_gpu_are_those_of_the_cpu(tiny: Dataset, label: str, cuda: torch.device) -> None:
    sampler = {"batch_size": 5, "seed": 3}
    with (
        make_loader(label.partition(" ")[0], tiny.train, device=cuda, **sampler, **LOADER_OPTIONS[label]) as loader,
        make_loader("ram", tiny.train, device="cpu", **sampler) as reference,
    ):
        on_gpu, on_cpu = Preprocess(tiny.train).to(cuda), Preprocess(tiny.train)
        for (images, _), (wanted, _) in zip(loader.epoch(1), reference.epoch(1), strict=True):
            assert images.device.type == "cuda"
            assert torch.equal(on_gpu(images).cpu(), on_cpu(wanted))


@pytest.mark.parametrize("name", ["shift", "affine"])
def test_augmentation_draws_the_same_numbers_on_the_gpu(tiny: Dataset, name: str, cuda: torch.device) -> None:
    augmented = []
    for device in (cuda, torch.device("cpu")):
        preprocess = Preprocess(tiny.train, AUGMENTS.build(AUGMENTS.complete({"name": name}))).to(device)
        (keys,) = preprocess.keys(EpochSampler(23, 23, 3, Shuffle.none), 1)
        augmented.append(preprocess(tiny.train.images.to(device), keys).cpu())
    assert torch.allclose(*augmented, atol=1e-4)


def test_pinned_memory_does_not_grow_while_the_gpu_lags_behind(tiny: Dataset, cuda: torch.device) -> None:
    with make_loader("ram", tiny.train, batch_size=1, device=cuda, seed=0) as loader:
        for number in range(3):
            for _ in loader.epoch(number):
                torch.cuda._sleep(5_000_000)
        assert loader.staging._made <= loader.staging.DEPTH


def test_a_set_that_does_not_fit_on_the_gpu_is_refused(cuda: torch.device) -> None:
    enormous = torch.zeros(1, dtype=torch.uint8).expand(2**45, 1)
    with pytest.raises(DoesNotFitError, match=r"gpu_slice: the set takes .* of memory on cuda"):
        make_loader("gpu_slice", (enormous, enormous), batch_size=1, device=cuda, seed=0)


def test_memory_that_work_takes_on_the_gpu_is_measured(cuda: torch.device) -> None:
    peak, _ = peak_memory(lambda: torch.ones(2**26, device=cuda).sum().item(), cuda)
    assert 2**28 <= peak.device < 2**29
    assert free_memory(cuda).device > 2**20


class SlowCopies(Loader):
    """Delays the stream that the copies are queued on, so that a batch is taken long before its memory holds it."""

    def __init__(self, base: Loader) -> None:
        super().__init__(base.sampler)
        self.base = base

    def batches(self, number: int, start: int) -> Batches:
        batches = self.base.epoch(number, start)
        for _ in range(len(self.sampler)):
            torch.cuda._sleep(20_000_000)
            yield next(batches)


def test_a_prefetched_batch_is_read_only_when_it_is_there(tiny: Dataset, cuda: torch.device) -> None:
    """The copies lag behind the consumer, and then the consumer behind the copies: the sums must not change."""
    sampler = EpochSampler(23, 2, 3)
    with make_loader("prefetch", tiny.train, batch_size=2, device=cuda, seed=3, base="ram") as loader:
        loader.base = SlowCopies(loader.base)
        for number in range(20):
            sums = []
            for images, _ in loader.epoch(number):
                sums.append(images.sum())
                torch.cuda._sleep(30_000_000 if number % 2 else 0)
                sums.append(images.sum())
                del images
            wanted = [tiny.train.images[indices].sum() for indices in sampler.batches(number)]
            assert [int(value) for value in sums] == [int(value) for value in wanted for _ in range(2)]


def test_the_timer_charges_a_slow_kernel_to_computing(cuda: torch.device) -> None:
    torch.cuda._sleep(1000)
    timer = EpochTimer(cuda)
    started = time.perf_counter()
    for _ in timer.waiting(range(3)):
        torch.cuda._sleep(50_000_000)
    timer.stop()
    outside = time.perf_counter() - started
    seconds = timer.seconds()
    assert seconds["computing"] > 10 * seconds["waiting"]
    assert sum(seconds.values()) == pytest.approx(outside, rel=0.01)


def test_an_epoch_waits_for_the_gpu_only_at_its_borders(tiny: Dataset, cuda: torch.device) -> None:
    """torch raises at the first call that would make the host wait."""
    with make_loader("gpu_slice", tiny.train, batch_size=5, device=cuda, seed=3) as loader:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(cuda)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
        step = TrainStep(model, Preprocess(tiny.train).to(cuda), optimizer, schedule, batch_size=5)
        steps = 0

        def after_step(timer: EpochTimer) -> None:
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error" if steps < len(loader) else "default")

        try:
            train_epoch(step, loader, EpochProgress(0, loader.sampler, cuda), after_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_measured_from_the_beginning_of_the_run(cuda: torch.device) -> None:
    block = torch.zeros(2**28, dtype=torch.uint8, device=cuda)
    del block
    torch.cuda.empty_cache()
    assert HardwareFigures(cuda).gpu_peak_mib() < 256


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("optimizer", test_step.OPTIMIZERS_UNDER_TEST)
@pytest.mark.parametrize("loader", ["gpu_slice", "ram", "prefetch", "disk"])
@pytest.mark.parametrize("compiled", [False, True])
def test_replay_on_the_gpu_is_the_eager_step_over_a_changing_rate(
    tiny: Dataset, cuda: torch.device, loader: str, optimizer: str, decay: float | None, compiled: bool
) -> None:
    """The same promise as on the CPU, with a real graph; nothing is read back while it is replayed."""
    eager, captured = (test_step.make_step(tiny, optimizer, decay=decay, device=cuda) for _ in range(2))
    with test_step.make_loader(tiny, loader, device=cuda) as batches:
        expected = test_step.train(eager, batches)
        metrics = test_step.train(captured, batches, epochs=1)
        if compiled:
            captured.compile(next(batches.epoch(0)), next(captured.preprocess.keys(batches.sampler, 0)))
        capture_step(captured, batches, accelerator_of(cuda))
        metrics += test_step.train(captured, batches, epochs=2, first=1)
    assert [one["train_loss"] for one in metrics] == pytest.approx([one["train_loss"] for one in expected], rel=1e-3)
    test_step.check_same_weights(captured.model, eager.model, tolerance=1e-3)
    test_step.check_same_weights(captured.eval_model, eager.eval_model, tolerance=1e-3)
    assert captured.lr == eager.lr


@pytest.mark.parametrize("precision", [Precision.tf32, Precision.bf16])
def test_less_precision_on_the_gpu_is_the_step_within_its_rounding(
    tiny: Dataset, cuda: torch.device, precision: Precision
) -> None:
    plain, rounded = (test_step.make_step(tiny, device=cuda, precision=one) for one in (Precision.fp32, precision))
    before = torch.backends.cuda.matmul.fp32_precision
    with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        images, labels = next(loader.epoch(0))
        for step in (plain, rounded):
            step.forward_backward(images, labels, next(step.preprocess.keys(loader.sampler, 0)), len(labels))
    assert 0 < test_step.gradient_difference(rounded.model, plain.model) < 0.02
    assert torch.backends.cuda.matmul.fp32_precision == before
