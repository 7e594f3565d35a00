"""The set is on the run's device, or the part of it that fits; a batch is one gather there, or a slice."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler, as_tensor
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS, Batches, Data, Loader
from vitmnist.loaders.pinned import PinnedBuffers, gather
from vitmnist.loaders.ram import in_memory
from vitmnist.loaders.residency import GpuSliceOptions, needed_memory, resident_fraction
from vitmnist.runtime.backend import Backend, backend_of
from vitmnist.runtime.memory import Memory, check_fits, free_memory_at, mib

log = logging.getLogger(__name__)


@LOADERS.register("gpu_slice", GpuSliceOptions)
class GpuSliceLoader(Loader):
    """Copies the set to the device once, and each epoch's permutation; no batch crosses the bus.

    Of a set that does not fit, only the first rows are there. The others cross the bus in each epoch, from where the
    set is: host memory, or a memory-mapped file.

    On the CPU the set is not copied. Contiguous batches are views. Each of several ranks keeps the set on its device.

    Raises:
        ConfigError: a dataset that is read sample by sample.
        DoesNotFitError: the device's memory is too small for what `resident` asks for.
    """

    def __init__(self, options: GpuSliceOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        if not isinstance(data, TensorSet):
            raise ConfigError(
                "gpu_slice: keeps a set of tensors on the device, and this one is read sample by sample; "
                "give it as (images, labels), or choose ram, cache, disk or prefetch"
            )
        super().__init__(sampler)
        fraction = resident_fraction(options.resident, [(data, sampler)], device)
        needs = needed_memory(fraction, data, device)
        check_fits("gpu_slice", needs, device, others=("ram", "cache", "disk"))
        backend = backend_of(device)
        tensors = in_memory(data, sampler.seed) if device.type == "cpu" else data
        rows = int(fraction * len(tensors))
        images, labels = (backend.to_device(part[:rows].detach()) for part in (tensors.images, tensors.labels))
        self._partial: PartialSet | None = None
        if rows == len(tensors):
            self.resident = TensorSet(images, labels)
        else:
            log.info(
                "gpu_slice: %s of %s rows (%s) stay on %s, which leaves %s free there",
                *(f"{rows:,}", f"{len(tensors):,}", mib(images.nbytes + labels.nbytes)),
                *(device, mib(free_memory_at(device))),
            )
            self._partial = PartialSet((images, labels), tensors, sampler, backend)

    @classmethod
    def needs(cls, options: GpuSliceOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """The resident part and the indices of an epoch; only the indices if the set is already on the device."""
        if not isinstance(data, TensorSet):
            return Memory()
        return needed_memory(resident_fraction(options.resident, [(data, sampler)], device), data, device)

    def batches(self, number: int, start: int) -> Batches:
        if self._partial:
            return self._partial.batches(number, start)
        assert self.resident is not None
        return gather(self.resident, self.sampler, number, start)


class PartialSet:
    """Batches of a set whose first rows are on the device.

    The resident rows of a batch are gathered there. Its missing rows are gathered into pinned buffers and copied, as
    `ram` does with whole batches, and then written into their positions in the batch. The host queues all of this.

    Args:
        resident: the first rows of the images and of the labels, on the device.
        tensors: the whole set, in host memory.
    """

    def __init__(
        self, resident: tuple[Tensor, Tensor], tensors: TensorSet, sampler: EpochSampler, backend: Backend
    ) -> None:
        tensors.check_on_host()
        self._resident = resident
        self._sampler = sampler
        self._backend = backend
        host = TensorSet(tensors.images.detach(), tensors.labels.detach())
        self._buffers = PinnedBuffers(backend, host, min(sampler.batch_size, sampler.size))

    def batches(self, number: int, start: int) -> Batches:
        """The batches of an epoch."""
        indices = list(map(as_tensor, self._sampler.batches(number, start)))
        if not indices:
            return
        missing = [batch >= len(self._resident[0]) for batch in indices]
        # Row 0 stands in for a missing row. The indices of a whole epoch are copied at once, as those of a resident set
        # are: a copy from pageable memory makes the host wait for the stream.
        rows = self._to_device([batch.masked_fill(mask, 0) for batch, mask in zip(indices, missing, strict=True)])
        positions = self._to_device([mask.nonzero().flatten() for mask in missing])
        for batch, mask, resident, uploaded in zip(indices, missing, rows, positions, strict=True):
            if mask.all():  # there may be no resident row to stand in
                yield self._buffers.send(batch)
                continue
            images, labels = (part.index_select(0, resident) for part in self._resident)
            if mask.any():
                for tensor, part in zip((images, labels), self._buffers.send(batch[mask]), strict=True):
                    tensor.index_copy_(0, uploaded, part)
            yield images, labels

    def _to_device(self, parts: list[Tensor]) -> Iterable[Tensor]:
        """Small host tensors on the device, by a single copy."""
        together = self._backend.to_device(torch.cat(parts))
        copies: tuple[Tensor, ...] = together.split([len(part) for part in parts])
        return copies
