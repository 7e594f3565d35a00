"""Stores samples as rows of tensors in memory, in a mapped file or on a device, and gathers batches by index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.background_map import map_slices
from vitmnist.store.cache_file import Chunks, open_or_write_cache


@dataclass(frozen=True)
class StoreOptions:
    """Where to store decoded samples, and how later processes find them.

    Args:
        folder: the folder for a mapped file; None stores the samples in host memory.
        fingerprint: identifies the samples for later processes; with None, the files disappear with this process.
    """

    folder: Path | None = None
    fingerprint: str | None = None


def store_rows(
    chunks: Callable[[], Chunks], size: int, options: StoreOptions, names: Sequence[str] = ("images", "labels")
) -> tuple[Tensor, ...]:
    """Store the tensors of all samples; `chunks`, `size` and `names` are as in `open_or_write_cache`."""
    if options.folder:
        mapped, _ = open_or_write_cache(options.folder, options.fingerprint, size, chunks, names=names)
        return mapped
    tensors: tuple[Tensor, ...] = ()
    filled = 0
    for chunk in chunks():
        # Allocate at full size: concatenating all chunks would need twice the memory.
        tensors = tensors or tuple(rows.new_empty((size, *rows.shape[1:])) for rows in chunk)
        for tensor, rows in zip(tensors, chunk, strict=True):
            tensor[filled : filled + len(rows)] = rows
        filled += len(chunk[0])
    if not tensors:
        raise DataError("the dataset is empty")
    return tensors


def is_large(shape: Sequence[int]) -> bool:
    """Whether images `[…, H, W]` are processed one by one, with their channels last; threads slow smaller ones down."""
    return shape[-2] * shape[-1] >= 96 * 96


def as_contiguous_rows(images: Tensor) -> Tensor:
    """Return a view with contiguous rows: `[N, H, W, C]` for images with their channels last in memory."""
    has_channels = images.dim() == 4 and images.shape[1] > 1 and images.stride(1) == 1
    is_channels_last = has_channels and images.is_contiguous(memory_format=torch.channels_last)
    return images.permute(0, 2, 3, 1) if is_channels_last else images


def gather_rows(tensors: Sequence[Tensor], indices: slice | Tensor, out: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Gather the rows at `indices`, int64 `[B]` on the device of the tensors; a slice gives views.

    Args:
        tensors: `[N, …]` each, of any dtype, on one device.
        out: buffers of at least B rows with the shapes of `as_contiguous_rows`; the first B rows are overwritten.
    """
    buffers: Sequence[Tensor | None] = out or [None] * len(tensors)
    return tuple(_gather(*pair, indices) for pair in zip(tensors, buffers, strict=True))


def _gather(tensor: Tensor, buffer: Tensor | None, indices: slice | Tensor) -> Tensor:
    stored = as_contiguous_rows(tensor)
    if isinstance(indices, slice):
        rows = stored[indices]
        gathered = rows if buffer is None else buffer[: len(rows)].copy_(rows)
    elif buffer is not None:
        gathered = torch.index_select(stored, 0, indices, out=buffer[: len(indices)])
    elif stored.dim() == 4 and stored.device.type == "cpu" and is_large(tensor.shape):
        gathered = stored.new_empty(len(indices), *stored.shape[1:])
        # Torch's threads would spin for 10 ms afterwards on the cores that `Preprocess` uses next: cropping a batch of
        # 64 images of 3×224×224 would take 16 ms instead of 12.
        map_slices(lambda span: torch.index_select(stored, 0, indices[span], out=gathered[span]), len(indices))
    else:
        gathered = stored.index_select(0, indices)
    return gathered if stored is tensor else gathered.permute(0, 3, 1, 2)
