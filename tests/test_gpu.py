"""What only a GPU can show; `pytest -m gpu` where there is one."""

from __future__ import annotations

import pytest
import torch

from vitmnist.clock import StepClock
from vitmnist.config import Shuffle
from vitmnist.data.dataset import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.records.hardware import HardwareFigures

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


def test_prefetched_batches_are_whole_under_a_long_kernel(tiny: Dataset, cuda: torch.device) -> None:
    """The consumer's stream lags far behind; memory that was reused too early would change the sums."""
    order = EpochOrder(23, 2, 3)
    with LOADERS.build(LOADER_OPTIONS[3], tiny.train, order, cuda) as loader:
        for number in range(20):
            sums = []
            for images, _ in loader.epoch(number):
                torch.cuda._sleep(5_000_000)
                sums.append(images.sum())
                del images
            wanted = [tiny.train.images[indices].sum() for indices in order.batches(number)]
            assert [int(value) for value in sums] == [int(value) for value in wanted]


def test_the_clock_charges_a_slow_kernel_to_computing(cuda: torch.device) -> None:
    torch.cuda._sleep(1000)
    clock = StepClock(cuda)
    for _ in range(3):
        clock.data_ready()
        torch.cuda._sleep(50_000_000)
        clock.step_done()
    waited, computed = clock.read()
    assert computed > 10 * waited


def test_memory_is_measured_from_the_beginning_of_the_run(cuda: torch.device) -> None:
    block = torch.zeros(2**28, dtype=torch.uint8, device=cuda)
    del block
    torch.cuda.empty_cache()
    assert HardwareFigures(cuda).gpu_peak_mib() < 256
