"""No batch is read before its copy has finished, and no memory is reused too early: shown on a fake device."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.support.fake_queue import FakeQueue, simulate_gpus
from vitmnist.data.datasets.base import ImageFiles, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.loaders import decoded
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.runtime import device as device_module
from vitmnist.runtime.device import choose_device
from vitmnist.store.tree import find_difference

DEVICE = torch.device("privateuseone")
LOADED = ["ram", "cache", "disk", "gpu_slice"]
COMPARED = [*LOADED, *(f"prefetch of {name}" for name in LOADED)]

Open = Callable[..., tuple[Loader, list[FakeQueue]]]


@pytest.fixture
def data() -> TensorSet:
    generator = torch.Generator().manual_seed(0)
    return TensorSet(torch.randint(0, 200, (50, 3), generator=generator, dtype=torch.uint8), torch.arange(50))


@pytest.fixture
def open_on_fake(data: TensorSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    def open_loader(label: str, kind: type[FakeQueue] = FakeQueue, shuffle: str = "sample") -> tuple[Loader, FakeQueue]:
        queue = kind(DEVICE)  # the loaders of a device share its queue
        monkeypatch.setitem(device_module.QUEUES, DEVICE.type, lambda device: queue)
        wrapper, _, name = label.rpartition(" of ")
        base = {"name": name, **{"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})}
        options = {"name": wrapper, "base": base} if wrapper else base
        return LOADERS.build(options, data, EpochSampler(50, 4, 1, shuffle), DEVICE), queue

    return open_loader


def epoch_on(device: FakeQueue, loader: Loader, epoch: int, late: bool) -> list[tuple[Tensor, Tensor]]:
    """An epoch whose consumer queues two reads of each batch and lets go of it, without ever waiting.

    Args:
        late: nothing that the consumer queued is done before the end; else, each step is at once.
    """
    seen: list[Tensor] = []
    for images, labels in loader.epoch(epoch):
        for _ in range(2):
            device.read(images, seen)
            device.read(labels, seen)
        del images, labels
        if not late:
            device.record_event().synchronize()
    device.finish()
    return list(zip(seen[::4], seen[1::4], strict=True)) + list(zip(seen[2::4], seen[3::4], strict=True))


def expected(data: TensorSet, loader: Loader, epoch: int) -> list[tuple[Tensor, Tensor]]:
    return [(data.images[indices], data.labels[indices]) for indices in loader.sampler.batch_indices(epoch)] * 2


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("shuffle", ["sample", "batch"])
@pytest.mark.parametrize("label", COMPARED)
def test_the_device_reads_the_bytes_of_the_batch(
    open_on_fake: Open, data: TensorSet, label: str, shuffle: str, late: bool
) -> None:
    loader, device = open_on_fake(label, shuffle=shuffle)
    with loader:
        for epoch in range(2):
            assert not find_difference(epoch_on(device, loader, epoch, late), expected(data, loader, epoch))


def test_images_of_files_and_their_labels_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pixels = FakeQueue(DEVICE), torch.arange(9 * 12, dtype=torch.uint8).view(9, 3, 2, 2)
    monkeypatch.setitem(device_module.QUEUES, DEVICE.type, lambda _: device)
    for images in (pixels, pixels.contiguous(memory_format=torch.channels_last)):
        files = ImageFiles(Path(), [*"012345678"], lambda path: pixels[int(path.name)].permute(1, 2, 0).numpy())
        split = Split(images, torch.arange(9), (0.5,) * 3, (0.5,) * 3, tuple("abcdefghi"), files=files)
        with LOADERS.build({"name": "disk"}, split, EpochSampler(9, 4, 1), DEVICE) as loader:
            batches = epoch_on(device, loader, 0, late=True)
        assert not find_difference(batches, [(pixels[rows], rows) for rows in loader.sampler.batch_indices(0)] * 2)
    assert device.pageable_copies == 0


class NeverWaits(FakeQueue):
    def wait_event(self, event: object) -> None:
        """The stream that computes does not wait for the copy stream, as in the article."""


class NeverHolds(FakeQueue):
    def record_stream(self, tensor: Tensor) -> Tensor:
        """The allocator is not told that another stream reads the memory."""
        return tensor


@pytest.mark.parametrize(
    ("label", "forgetful"),
    [("prefetch of ram", NeverWaits), ("prefetch of gpu_slice", NeverWaits), ("prefetch of disk", NeverHolds)],
)
def test_each_of_the_precautions_is_needed(
    open_on_fake: Open, data: TensorSet, label: str, forgetful: type[FakeQueue]
) -> None:
    """The proof of the test above: on the same device, a loader that leaves one out delivers something else."""
    loader, device = open_on_fake(label, forgetful)
    with loader:
        batches = expected(data, loader, 0)
        assert any(find_difference(epoch_on(device, loader, 0, late), batches) for late in (True, False))


@pytest.mark.parametrize("label", ["prefetch of ram", "prefetch of gpu_slice"])
def test_batches_do_not_pile_up_on_a_device_that_lags_behind_the_host(open_on_fake: Open, label: str) -> None:
    loader, device = open_on_fake(label)
    with loader:
        stored = device.most_blocks  # `gpu_slice` stores the dataset.
        epoch_on(device, loader, 0, late=True)
        blocks_per_batch = 2  # Images and labels
        assert (device.most_blocks - stored) / blocks_per_batch <= loader.options.queue_size + 4 < len(loader)


def test_a_host_that_runs_ahead_waits_for_its_copies(open_on_fake: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "MAX_PENDING_COPIES", 3)
    loader, device = open_on_fake("ram")
    with loader:
        epoch_on(device, loader, 0, late=True)
    assert device.most_copies == 2 * 3 < 2 * len(loader)  # Images and labels


@pytest.mark.parametrize("label", ["ram", "prefetch of ram", "prefetch of gpu_slice"])
def test_abandoned_epochs_do_not_disturb_the_next(open_on_fake: Open, data: TensorSet, label: str) -> None:
    """Their uploads are under way when their memory and their buffers are used again."""
    loader, device = open_on_fake(label)
    with loader:
        for epoch in range(8):
            abandoned = loader.epoch(epoch)
            next(abandoned)
            del abandoned
        assert not find_difference(epoch_on(device, loader, 0, late=True), expected(data, loader, 0))


def test_a_gpu_that_cannot_be_used_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver counts a GPU that torch cannot use."""
    message = "The NVIDIA driver on your system is too old. Please update it.\nDetails."
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(message)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    reason = r"torch sees no CUDA device here \(CUDA_VISIBLE_DEVICES='0'\): The .* too old"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match=rf"^device={name}: {reason}; set device=auto or device=cpu$"):
            choose_device(name)
    assert choose_device("auto") == torch.device("cpu")
    assert re.fullmatch(f"device=auto: no GPU can be used: {reason}", caplog.messages[-1])


@pytest.mark.parametrize(
    ("capability", "architectures", "is_usable"),
    [
        ((7, 0), "sm_75 sm_80 sm_90", False),
        ((8, 9), "sm_75 sm_86", True),
        ((8, 0), "sm_75 sm_86", False),
        ((10, 3), "sm_90 compute_90", True),
        ((9, 0), "gfx90a gfx942", True),
    ],
)
def test_a_gpu_without_kernels_in_this_torch_is_not_chosen(
    capability: tuple[int, int], architectures: str, is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Binary code runs on later GPUs of its major capability, PTX on all later GPUs; ROCm has other names."""
    simulate_gpus(monkeypatch, 1, 0, capability, architectures)
    assert choose_device("auto") == (torch.device("cuda", 0) if is_usable else torch.device("cpu"))
    if not is_usable:
        with pytest.raises(ConfigError, match=r"^device=cuda: A GPU has compute capability .* only; set device=cpu"):
            choose_device("cuda")


def test_the_current_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script calls `torch.cuda.set_device` before it makes a loader."""
    simulate_gpus(monkeypatch, 2, current=1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
