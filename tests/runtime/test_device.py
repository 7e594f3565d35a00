"""No batch is read before its copy has finished, and no memory is reused too early: shown on a fake device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.support.fake_backend import FakeBackend
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.loaders.decoded import PinnedBuffers
from vitmnist.replacement.decoded_dataset import BatchRows
from vitmnist.runtime import device as device_module
from vitmnist.runtime.device import PassedEvent, choose_device

DEVICE = torch.device("privateuseone")
LOADED = ["ram", "cache", "disk", "gpu_slice"]
COMPARED = [*LOADED, *(f"prefetch of {name}" for name in LOADED)]

Open = Callable[..., tuple[Loader, list[FakeBackend]]]


@pytest.fixture
def data() -> TensorSet:
    generator = torch.Generator().manual_seed(0)
    return TensorSet(torch.randint(0, 200, (50, 3), generator=generator, dtype=torch.uint8), torch.arange(50))


@pytest.fixture
def open_on_fake(data: TensorSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    def open_loader(
        label: str, kind: type[FakeBackend] = FakeBackend, shuffle: str = "sample"
    ) -> tuple[Loader, FakeBackend]:
        one = kind(DEVICE)  # the loaders of a device share what the device is
        monkeypatch.setitem(device_module.BACKENDS, DEVICE.type, lambda device: one)

        def values(name: str) -> dict[str, Any]:
            options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}
            return LOADERS.complete({"name": name, **options.get(name, {})})

        wrapper, _, base = label.rpartition(" of ")
        options = {**values("prefetch"), "base": values(base)} if wrapper else values(base)
        return LOADERS.build(options, data, EpochSampler(50, 4, 1, shuffle), DEVICE), one

    return open_loader


def epoch_on(device: FakeBackend, loader: Loader, number: int, late: bool) -> list[tuple[Tensor, Tensor]]:
    """An epoch whose consumer queues two reads of each batch and lets go of it, without ever waiting.

    Args:
        late: nothing that the consumer queued is done before the end; else, each step is at once.
    """
    seen: list[Tensor] = []
    for images, labels in loader.epoch(number):
        for _ in range(2):
            device.read(images, seen)
            device.read(labels, seen)
        del images, labels
        if not late:
            device.record_event().synchronize()
    device.finish()
    return list(zip(seen[::4], seen[1::4], strict=True)) + list(zip(seen[2::4], seen[3::4], strict=True))


def expected(data: TensorSet, loader: Loader, number: int) -> list[tuple[Tensor, Tensor]]:
    return [(data.images[indices], data.labels[indices]) for indices in loader.sampler.batches(number)] * 2


def same(found: list[tuple[Tensor, Tensor]], wanted: list[tuple[Tensor, Tensor]]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(one, other) for pairs in zip(found, wanted, strict=True) for one, other in zip(*pairs, strict=True)
    )


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("shuffle", ["sample", "batch"])
@pytest.mark.parametrize("label", COMPARED)
def test_what_the_device_reads_is_the_batch(
    open_on_fake: Open, data: TensorSet, label: str, shuffle: str, late: bool
) -> None:
    loader, device = open_on_fake(label, shuffle=shuffle)
    with loader:
        for number in range(2):
            assert same(epoch_on(device, loader, number, late), expected(data, loader, number))


class NeverWaits(FakeBackend):
    def wait_event(self, event: object) -> None:
        """As in the article: the copy stream is not joined to the one that computes."""


class NeverHolds(FakeBackend):
    def record_stream(self, tensor: Tensor) -> None:
        """The allocator is not told that another stream reads the memory."""


class NeverSynchronizes(FakeBackend):
    def record_event(self) -> PassedEvent:
        """A pinned buffer is filled again while the device still copies out of it."""
        return PassedEvent()


@pytest.mark.parametrize(
    ("label", "forgetful"),
    [
        ("prefetch of ram", NeverWaits),
        ("prefetch of gpu_slice", NeverWaits),
        ("prefetch of disk", NeverHolds),
        ("ram", NeverSynchronizes),
    ],
)
def test_each_of_the_precautions_is_needed(
    open_on_fake: Open, data: TensorSet, label: str, forgetful: type[FakeBackend]
) -> None:
    """The proof of the test above: on the same device, a loader that leaves one out delivers something else."""
    loader, device = open_on_fake(label, forgetful)
    with loader:
        assert not all(same(epoch_on(device, loader, 0, late), expected(data, loader, 0)) for late in (True, False))


@pytest.mark.parametrize(
    ("label", "blocks"),  # of a batch; gpu_slice gathers the labels of an epoch at once
    [("prefetch of ram", 2), ("prefetch of gpu_slice", 1)],
)
def test_batches_do_not_pile_up_on_a_device_that_lags_behind_the_host(
    open_on_fake: Open, label: str, blocks: int
) -> None:
    loader, device = open_on_fake(label)
    with loader:
        kept = device.most_blocks  # of gpu_slice
        epoch_on(device, loader, 0, late=True)
        assert (device.most_blocks - kept) / blocks <= loader.options.queue_size + 4 < len(loader)


@pytest.mark.parametrize("label", ["ram", "prefetch of ram"])
def test_one_pool_of_pinned_buffers_and_one_stream_serve_all_epochs(open_on_fake: Open, label: str) -> None:
    loader, device = open_on_fake(label)
    with loader:
        for number in range(5):
            epoch_on(device, loader, number, late=True)
    assert device.made_pinned == 2 * PinnedBuffers.DEPTH  # images and labels
    assert len(device.streams) == (2 if "prefetch" in label else 1)  # the default one, and the loader's


def test_more_iterators_than_buffers_do_not_wait_for_each_other(open_on_fake: Open, data: TensorSet) -> None:
    loader, device = open_on_fake("ram")
    with loader:
        iterators = [loader.epoch(number) for number in range(2 * PinnedBuffers.DEPTH)]
        batches = [next(iterator) for iterator in iterators]
        seen: list[Tensor] = []
        for images, _ in batches:
            device.read(images, seen)
        device.finish()
        for number, images in enumerate(seen):
            assert torch.equal(images, data.images[next(loader.sampler.batches(number))])


@pytest.mark.parametrize("label", ["ram", "prefetch of ram", "prefetch of gpu_slice"])
def test_abandoned_epochs_do_not_disturb_the_next(open_on_fake: Open, data: TensorSet, label: str) -> None:
    """Their uploads are under way when their memory and their buffers are used again."""
    loader, device = open_on_fake(label)
    with loader:
        for number in range(2 * PinnedBuffers.DEPTH):
            abandoned = loader.epoch(number)
            next(abandoned)
            del abandoned
        assert same(epoch_on(device, loader, 0, late=True), expected(data, loader, 0))


def test_indices_of_gathered_samples_come_from_pinned_memory(data: TensorSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a copy from any other the host waits, and so for all work that is queued."""
    device = FakeBackend(DEVICE)
    monkeypatch.setitem(device_module.BACKENDS, "cpu", lambda _: device)
    kept = replace(BatchRows.of([data.images], 50), tensors=(device.to_device(data.images),))
    seen: list[Tensor] = []
    wanted = [[number, 49 - number] for number in range(10)]
    for indices in wanted:
        device.read(kept.gather(indices)[0], seen)
    assert device.made_pinned == len(wanted)
    device.finish()
    assert all(torch.equal(found, data.images[indices]) for found, indices in zip(seen, wanted, strict=True))


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
