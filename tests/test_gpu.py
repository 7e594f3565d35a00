"""What only a GPU can show; `pytest -m gpu` where there is one."""

from __future__ import annotations

import pytest
import torch

from vitmnist import engine
from vitmnist.clock import Clock
from vitmnist.config import Shuffle
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.contract import Batches
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.records.hardware import HardwareFigures
from vitmnist.schedule import SCHEDULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
DISK = {
    "name": "disk",
    "num_workers": 2,
    "pin_memory": True,
    "prefetch_factor": 2,
    "persistent_workers": True,
}
LOADER_OPTIONS = [
    DISK,
    {"name": "ram"},
    {"name": "gpu_slice"},
    {"name": "prefetch", "queue_size": 2, "base": {"name": "ram"}},
    {"name": "prefetch", "queue_size": 2, "base": {"name": "gpu_slice"}},
    {"name": "prefetch", "queue_size": 2, "base": DISK},
]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("shuffle", Shuffle)
@pytest.mark.parametrize(
    "options", LOADER_OPTIONS, ids=lambda o: "-".join([o["name"], o.get("base", {}).get("name", "")])
)
def test_batches_on_the_gpu_are_those_of_the_cpu(
    tiny: Dataset, options: dict, shuffle: Shuffle, cuda: torch.device
) -> None:
    order = EpochOrder(23, 5, 3, shuffle)
    with (
        LOADERS.build(options, tiny.train, order, cuda) as loader,
        LOADERS.build({"name": "ram"}, tiny.train, order, torch.device("cpu")) as reference,
    ):
        on_gpu, on_cpu = Preprocess(tiny.train).to(cuda), Preprocess(tiny.train)
        for (images, labels), (wanted, wanted_labels) in zip(loader.epoch(1), reference.epoch(1), strict=True):
            assert images.device.type == labels.device.type == "cuda"
            assert torch.equal(on_gpu(images).cpu(), on_cpu(wanted))
            assert torch.equal(labels.cpu(), wanted_labels)


class SlowCopies(Loader):
    """Delays the stream that the copies are queued on, so that a batch is taken long before its memory holds it."""

    def __init__(self, base: Loader) -> None:
        super().__init__(base.order)
        self.base = base

    def batches(self, number: int, start: int) -> Batches:
        batches = self.base.epoch(number, start)
        for _ in range(len(self.order)):
            torch.cuda._sleep(20_000_000)
            yield next(batches)


def test_a_prefetched_batch_is_read_only_when_it_is_there(tiny: Dataset, cuda: torch.device) -> None:
    """The copies lag behind the consumer, and then the consumer behind the copies: the sums must not change."""
    order = EpochOrder(23, 2, 3)
    with LOADERS.build(LOADER_OPTIONS[3], tiny.train, order, cuda) as loader:
        loader.base = SlowCopies(loader.base)
        for number in range(20):
            sums = []
            for images, _ in loader.epoch(number):
                sums.append(images.sum())
                torch.cuda._sleep(30_000_000 if number % 2 else 0)
                sums.append(images.sum())
                del images
            wanted = [tiny.train.images[indices].sum() for indices in order.batches(number)]
            assert [int(value) for value in sums] == [int(value) for value in wanted for _ in range(2)]


def test_the_clock_charges_a_slow_kernel_to_computing(cuda: torch.device) -> None:
    torch.cuda._sleep(1000)
    clock = Clock(cuda)
    for _ in range(3):
        clock.begin("computing")
        torch.cuda._sleep(50_000_000)
        clock.begin("waiting")
    assert clock.seconds("computing") > 10 * clock.seconds("waiting")


def test_an_epoch_waits_for_the_gpu_only_at_its_borders(tiny: Dataset, cuda: torch.device) -> None:
    """torch raises at the first call that would make the host wait."""
    with LOADERS.build({"name": "gpu_slice"}, tiny.train, EpochOrder(23, 5, 3), cuda) as loader:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(cuda)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
        steps = 0

        def advance() -> None:
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error" if steps < len(loader) else "default")

        preprocess = Preprocess(tiny.train).to(cuda)
        try:
            engine.train_epoch(model, loader, 0, preprocess, optimizer, schedule, cuda, advance)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_measured_from_the_beginning_of_the_run(cuda: torch.device) -> None:
    block = torch.zeros(2**28, dtype=torch.uint8, device=cuda)
    del block
    torch.cuda.empty_cache()
    assert HardwareFigures(cuda).gpu_peak_mib() < 256
