"""What only a GPU can show; `pytest -m gpu -n0` where there is one, in one process: its memory is nobody else's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import PLAIN, REPOSITORY, Train, result_of
from tests.training import test_step
from vitmnist import make_loader
from vitmnist.config.schema import Precision, Shuffle
from vitmnist.data.augment import AUGMENTS
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import Loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.loaders.pinned import HostLoader, PinnedBuffers
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.device import _capture_stream, accelerator_of
from vitmnist.runtime.memory import DoesNotFitError, free_memory, peak_memory
from vitmnist.runtime.signals import UNFINISHED
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
    "gpu_slice (half resident)": {"resident": 0.5},
    "cache": {},
    "prefetch of ram": {"base": "ram"},
    "prefetch of gpu_slice": {"base": "gpu_slice"},
    "prefetch of half": {"base": {"name": "gpu_slice", "resident": 0.5}},
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


@pytest.mark.parametrize("name", ["shift", "affine", "cifar", "crops"])
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
        assert isinstance(loader, HostLoader)
        assert loader.buffers._count <= PinnedBuffers.DEPTH


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


def test_a_partly_resident_batch_is_read_only_when_it_is_there(tiny: Dataset, cuda: torch.device) -> None:
    """The uploads lag behind the consumer, and then the consumer behind the uploads: the sums must not change."""
    with make_loader("gpu_slice", tiny.train, batch_size=2, device=cuda, seed=3, resident=0.5) as loader:
        assert loader._partial is not None
        for number in range(20):
            sums = []
            for images, _ in loader.epoch(number):
                sums.append(images.sum())
                torch.cuda._sleep(30_000_000 if number % 2 else 0)
                with torch.cuda.stream(loader._partial._stream):
                    torch.cuda._sleep(0 if number % 2 else 20_000_000)
                sums.append(images.sum())
                del images
            wanted = [tiny.train.images[indices].sum() for indices in loader.sampler.batches(number)]
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
    peak = HardwareFigures(cuda).gpu_peak_mib()
    assert peak is not None
    assert peak < torch.cuda.memory_allocated(cuda) / 2**20 + 1


def test_utilisation_is_measured_over_a_second_of_work(cuda: torch.device) -> None:
    figures = HardwareFigures(cuda)
    ended = time.monotonic() + 3
    while time.monotonic() < ended:
        torch.cuda._sleep(10_000_000)
        torch.cuda.synchronize()
    busy = figures.gpu_util_pct()
    if busy is None:
        pytest.skip("the driver has no samples here, as in some containers")
    assert busy > 50


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
    before = torch.get_float32_matmul_precision()
    with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        images, labels = next(loader.epoch(0))
        for step in (plain, rounded):
            step.forward_backward(images, labels, next(step.preprocess.keys(loader.sampler, 0)), len(labels))
    difference = test_step.gradient_difference(rounded.model, plain.model)
    assert difference < 0.02
    assert difference > 0 or precision == Precision.tf32  # cuBLAS may have no tf32 kernel for matrices this small
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("precision", [Precision.tf32, Precision.bf16])
def test_any_precision_can_be_compiled_and_captured(tiny: Dataset, cuda: torch.device, precision: Precision) -> None:
    step = test_step.make_step(tiny, device=cuda, precision=precision)
    with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        step.compile(next(loader.epoch(0)), next(iter(step.preprocess.keys(loader.sampler, 0))))
        capture_step(step, loader, accelerator_of(cuda))
        assert test_step.train(step, loader, epochs=1)[0]["train_loss"] > 0


def run_program(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_model_that_waits_for_the_gpu_is_not_captured_and_spoils_nothing() -> None:
    """In a process of its own: in torch 2.11 a capture that fails leaves the process unable to capture again."""
    program = """
        import torch
        from torch import nn
        from vitmnist.runtime.device import accelerator_of

        device = torch.device("cuda", 0)
        accelerator, ones = accelerator_of(device), torch.ones(1000, device=device)
        before = torch.cuda.current_stream()
        for read_back in (lambda: ones.sum().item(), lambda: ones.nonzero(), lambda: ones.cpu()):
            try:
                accelerator.capture(read_back, 3)
            except RuntimeError as error:
                assert "synchronizing" in str(error), error
            else:
                raise AssertionError("captured")
            assert torch.cuda.current_stream() == before
            assert torch.cuda.get_sync_debug_mode() == 0
            torch.cuda.empty_cache()
        replay = accelerator.capture(lambda: ones.add_(1), 3)
        torch.cuda.synchronize()
        value = ones[0].item()
        replay()
        assert ones[0].item() == value + 1
        memory = torch.cuda.memory_allocated()
        weights = torch.ones(256, 256, device=device)
        for _ in range(5):
            accelerator.capture(lambda: weights @ weights, 3)
            torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - memory < 64 * 2**20, "one workspace of cuBLAS, not five"
    """
    run_program(program)


def test_an_error_within_the_capture_itself_is_the_one_that_is_raised() -> None:
    program = """
        import torch
        from vitmnist.runtime.device import accelerator_of

        calls, ones = 0, torch.ones(1000, device="cuda")

        def work():
            global calls
            calls += 1
            ones.add_(1)
            if calls == 4:
                raise ValueError("of the model")

        try:
            accelerator_of(torch.device("cuda", 0)).capture(work, 3)
        except ValueError as error:
            assert "of the model" in str(error)
        else:
            raise AssertionError("captured")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    """
    run_program(program)


def test_a_thread_may_allocate_memory_while_a_step_is_captured(tiny: Dataset, cuda: torch.device) -> None:
    stop, uploads = threading.Event(), 0
    stream = torch.cuda.Stream(cuda)
    while stream.cuda_stream == _capture_stream(cuda).cuda_stream:  # torch hands out 32 streams in turn
        stream = torch.cuda.Stream(cuda)

    def upload() -> None:
        nonlocal uploads
        with torch.cuda.stream(stream):
            while not stop.is_set():
                # Always larger than what the allocator has kept.
                torch.ones((uploads + 1) * 2**20, dtype=torch.uint8).to(cuda, non_blocking=True)
                uploads += 1

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        step = test_step.make_step(tiny, device=cuda)
        with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
            capture_step(step, loader, accelerator_of(cuda))
    finally:
        stop.set()
        thread.join()
    assert uploads


@pytest.mark.parametrize("trainer", ["plain", "fast"])
def test_a_run_stopped_on_the_gpu_ends_as_if_it_had_not_been(
    trainer: str, train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two steps of an epoch, and resumed."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    arguments = [argument for argument in quick if argument != PLAIN]
    arguments += [f"trainer={trainer}", "device=cuda", "data/loader=gpu_slice", "ema_decay=0.9", "schedule=one_cycle"]
    assert train_here(*arguments, "hydra.run.dir=whole").returncode == 0
    assert train_here(*arguments, "max_minutes=0", "hydra.run.dir=stopped").returncode == UNFINISHED
    resumed = train_here("resume=stopped", "max_minutes=null")
    assert resumed.returncode == 0, resumed.stderr
    whole, stopped = (load_file(tmp_path / name / "checkpoints" / "final.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    result = result_of(tmp_path / "stopped")
    assert result["device"].startswith("cuda")
    assert result["trainer"]["cuda_graph"] is (trainer == "fast")
    assert result["trainer"]["compile"] is (trainer == "fast")
