"""What a loader loads: samples by their index, and samples that are two tensors already."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitmnist.data.channel_statistics import channel_statistics
from vitmnist.errors import DataError
from vitmnist.store.cache_file import decode_once
from vitmnist.store.rows import Checksums, Rows

Tensors = TypeVar("Tensors", bound="TensorSet")
CHUNK = 1024  # samples of a set of tensors that are written at a time


class SampleSource(ABC):
    """Samples by their index; random ones are a pure function of (seed, epoch, index)."""

    is_decoded = False
    """Whether the samples are tensors; otherwise each is read, and may be random."""

    @property
    def fingerprint(self) -> str | None:
        """Identifies the content of the samples; None if it is unknown."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: slice | Tensor, epoch: int = 0) -> Any:
        """The samples at these indices (int64 `[B]`) as one batch: images and labels, or whatever the samples are."""

    @abstractmethod
    def chunks(self) -> Iterable[tuple[Tensor, Tensor]]:
        """All samples in turn, as images and labels.

        Raises:
            ConfigError: a sample is random.
            DataError: they are no such pairs.
        """

    @abstractmethod
    def in_memory(self) -> TensorSet:
        """All samples as tensors in memory; raises as `chunks`."""

    @abstractmethod
    def bytes_to_load(self, device: torch.device) -> int:
        """What having all samples in the memory of a device would allocate."""

    @abstractmethod
    def part(self, span: slice) -> SampleSource:
        """The samples of a span."""

    def in_file(self, folder: Path, fingerprint: str | None = None) -> TensorSet:
        """All samples in a memory-mapped file of `folder`; raises as `chunks` and `decode_once`.

        Args:
            fingerprint: identifies samples whose content is unknown. Without one, their file is for this call only.
        """
        contents = self.fingerprint or (fingerprint and f"{fingerprint}, {len(self)} samples")
        entry = decode_once(folder, contents or None, len(self), self.chunks)
        (images, labels), (of_images, of_labels) = entry.tensors, entry.checksums
        of_labels.verify(labels)
        return TensorSet(images, labels, checksums=of_images)

    def stored(self) -> SampleSource:
        """The samples as they are stored, for a loader that reads each when it is needed."""
        return self

    def channel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of uint8 images; raises as the function of this name."""
        return channel_statistics(images for images, _ in self.chunks())


@dataclass(frozen=True)
class TensorSet(SampleSource):
    """Images and labels as two tensors with the same first dimension.

    Args:
        images: `[N, …]` of any dtype.
        labels: `[N, …]` of any dtype.
        checksums: of `images`, if they are a memory-mapped file, whose pages are read on demand.

    Raises:
        DataError: not tensors, or of different lengths.
    """

    is_decoded = True

    images: Tensor
    labels: Tensor
    _: KW_ONLY
    checksums: Checksums | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("images", self.images), ("labels", self.labels)):
            if not isinstance(tensor, Tensor):
                raise DataError(f"{name}: must be a tensor or a NumPy array, found {type(tensor).__name__}")
            if not tensor.dim():
                raise DataError(f"{name}: must have a first dimension of samples, found a single value")
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images, but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> Rows:
        """Images and labels, without their gradients."""
        return Rows((self.images.detach(), self.labels.detach()), (self.checksums,) if self.checksums else ())

    def read(self, indices: slice | Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        images, labels = self.rows.gather(indices)
        return images, labels

    def chunks(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.images.split(CHUNK), self.labels.split(CHUNK), strict=True)

    def in_memory(self) -> TensorSet:
        return TensorSet(*self.rows.in_memory().tensors) if self.checksums else self

    def bytes_to_load(self, device: torch.device) -> int:
        return self.nbytes if self.checksums or self.images.device.type != device.type else 0

    def in_file(self, folder: Path, fingerprint: str | None = None) -> TensorSet:
        self.check_on_host()
        if self.checksums or not len(self):
            return self
        # Its own labels, because sets of the same images and other labels share a file.
        return replace(super().in_file(folder), labels=self.labels)

    def stored(self) -> SampleSource:
        self.check_on_host()
        return self

    def part(self: Tensors, span: slice, **changes: Any) -> Tensors:
        """The samples of a span, as views; `changes` replace other fields."""
        checksums = self.checksums[span] if self.checksums else None
        fields = {"images": self.images[span], "labels": self.labels[span], "checksums": checksums, **changes}
        return replace(self, **fields)

    @property
    def fingerprint(self) -> str:
        return f"{self.images.dtype} {list(self.images.shape)} {digest(self.images)}"

    def check_on_host(self) -> None:
        """Raise `DataError` if the tensors are not in host memory."""
        for tensor in (self.images, self.labels):
            if tensor.device.type != "cpu":
                raise DataError(f"the set is on {tensor.device}, not in host memory; gpu_slice leaves it there")

    @property
    def nbytes(self) -> int:
        """Bytes of images and labels."""
        return self.images.nbytes + self.labels.nbytes


def digest(tensor: Tensor) -> str:
    """SHA-256 of a CPU tensor's elements."""
    checksum = hashlib.sha256()
    for part in tensor.split(CHUNK):  # images may have their channels last in memory: not all are copied at once
        checksum.update(part.contiguous().view(torch.uint8).numpy().data)
    return checksum.hexdigest()
