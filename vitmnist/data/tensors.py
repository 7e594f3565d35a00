"""A set of samples as two tensors: its checks, checksum and channel statistics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from vitmnist.errors import DataError

CHANNELS = (1, 3, 4)  # plausible sizes of the last dimension of channels-last images


@dataclass(frozen=True)
class TensorSet:
    """Images and labels as two tensors with the same first dimension.

    Args:
        images: `[N, …]` of any dtype.
        labels: `[N, …]` of any dtype.
        mapped: `images` is a memory-mapped file, whose pages are read on demand.

    Raises:
        DataError: not tensors, or of different lengths.
    """

    images: Tensor
    labels: Tensor
    _: KW_ONLY
    mapped: bool = False

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
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def check_layout(shape: Sequence[int], channels: int | None = None) -> None:
    """Raise `DataError` if images of this shape are not `[B, C, H, W]` with `channels` channels (None: any number)."""
    found = f"images: must be [B, C, H, W], found {list(shape)}"
    if len(shape) == 3:
        raise DataError(f"{found}; images.unsqueeze(1) adds the channels, images.unsqueeze(0) makes one image a batch")
    if len(shape) != 4:
        raise DataError(found)
    plausible = CHANNELS if channels is None else (channels,)
    if shape[1] not in plausible and shape[3] in plausible:
        raise DataError(f"{found}, with the channels last; images.permute(0, 3, 1, 2) puts them first")
    if channels is not None and shape[1] != channels:
        raise DataError(
            f"images: {shape[1]} channel(s) {list(shape)}, but the mean and std are of {channels}; "
            "build Preprocess from the data that it is given, or with their mean= and std="
        )


def channel_statistics(images: Tensor | Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel of uint8 `[N, C, H, W]`, scaled to 0…1.

    Exact up to the last root and division: integers are summed, in chunks to bound the memory.

    Args:
        images: one tensor, or batches.

    Raises:
        DataError: another dtype or layout, or no image.
    """
    total = squares = torch.zeros((), dtype=torch.int64, device="cpu")
    pixels, channels = 0, None
    for chunk in images.split(1000) if isinstance(images, Tensor) else images:
        if chunk.dtype != torch.uint8:
            raise DataError(
                f"images: mean and std are computed from uint8, found {chunk.dtype}; "
                "for floats, give the mean= and std= they were normalised with (0 and 1 for floats in 0…1)"
            )
        check_layout(chunk.shape, channels)
        channels = chunk.shape[1]
        wide = chunk.to(torch.int32)
        total = total + wide.sum(dim=(0, 2, 3)).cpu()
        squares = squares + wide.square_().sum(dim=(0, 2, 3)).cpu()
        pixels += chunk.numel() // channels
    if not pixels:
        raise DataError("the dataset is empty")
    mean, std = [], []
    for value_sum, square_sum in zip(total.tolist(), squares.tolist(), strict=True):
        mean.append(value_sum / (255 * pixels))
        deviation = math.sqrt(square_sum * pixels - value_sum * value_sum) / pixels
        # A constant channel would divide by zero; one step of a byte keeps it finite.
        std.append((deviation or 1.0) / 255)
    return tuple(mean), tuple(std)
