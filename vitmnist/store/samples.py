"""Samples of any structure and of different sizes, kept as bytes in memory or in a mapped file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.store.cache_file import decode_once
from vitmnist.store.sample_bytes import (
    Buffer,
    LoadImage,
    decode_plain,
    encode_plain,
    pickle_sample,
    unpickle_sample,
)
from vitmnist.store.tree import Structure, flatten

BYTE_MODES = frozenset(("L", "LA", "RGB", "RGBA"))  # The modes of PIL images with 8 bits for each channel.
FILES = ("samples", "spans")  # The fields of a cache that are files.


@dataclass(frozen=True)
class EncodedSamples:
    """The bytes of consecutive samples.

    Args:
        content: of all of them, uint8.
        spans: where each begins and ends in it; int64 `[N, 2]`.
        image_modes: of the PIL images in them.
        structure: of each; None if they differ.
    """

    content: Tensor
    spans: Tensor
    image_modes: frozenset[str]
    structure: Structure | None


@dataclass(frozen=True)
class Samples:
    """Samples of any structure, pickled, or in a file without pickle.

    Args:
        blocks: the bytes of the samples, uint8; one or more blocks of memory.
        spans: for each sample the block, and where it begins and ends there; int64 `[N, 3]`.
        image_modes: of the PIL images in the samples.
        structure: of each sample; None if they differ.
        is_mapped: the samples are in a file and so not pickled.
        as_tensors: load images as uint8 tensors `[C, H, W]`, not as PIL images.
    """

    blocks: Sequence[Tensor]
    spans: Tensor
    image_modes: frozenset[str]
    structure: Structure | None = None
    is_mapped: bool = False
    as_tensors: bool = False

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Any:
        """A copy of the sample."""
        return self._load(index, as_views=False)

    def view(self, index: int) -> Any:
        """The sample; its tensors, arrays and images may be views of the stored bytes, not to be changed."""
        return self._load(index, as_views=True)

    def _load(self, index: int, as_views: bool) -> Any:
        block, start, stop = self.spans[index].tolist()
        content = self.blocks[block][start:stop].numpy().data
        load_image: LoadImage = Image.frombytes
        if self.as_tensors:
            load_image = _load_image_view if as_views else _load_image_tensor
        if self.is_mapped and self.structure:
            return decode_plain(content, self.structure, load_image, as_views=as_views)
        return unpickle_sample(content, load_image, as_views=as_views)

    def with_tensors(self) -> Samples:
        """The same samples with images as uint8 tensors; raises `DataError` if some are not of 8-bit channels."""
        if self.structure is None:
            raise DataError("transforms='tensor': is for samples of one structure")
        if others := self.image_modes - BYTE_MODES:
            raise DataError(
                f"pictures of mode {', '.join(sorted(others))} are no tensors of bytes; convert them to L or RGB"
            )
        return replace(self, as_tensors=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int((self.spans[:, 2] - self.spans[:, 1]).sum()) + self.spans.nbytes


def encode_samples(samples: Iterable[Any], for_file: Structure | None = None) -> EncodedSamples:
    """The bytes of some samples; raises `DataError` if one cannot be kept.

    Args:
        for_file: the structure of samples for a file; None pickles them.
    """
    content, spans, modes, structures = bytearray(), [], set[str](), []
    for sample in samples:
        if for_file is None:
            parts, image_modes = pickle_sample(sample)
            structures.append(flatten(sample)[1])
        else:
            parts, image_modes = encode_plain(sample, for_file)
        start = len(content)
        for part in parts:
            content += part
        spans.append((start, len(content)))
        modes |= image_modes
    stored = torch.frombuffer(content, dtype=torch.uint8)
    return EncodedSamples(stored, torch.tensor(spans), frozenset(modes), for_file or _common(structures))


def samples_in_memory(chunks: Iterable[EncodedSamples], expected_nbytes: int) -> Samples:
    """All samples of some chunks.

    Args:
        expected_nbytes: of all samples; more memory is taken in smaller blocks.

    Raises:
        DoesNotFitError: there is too little memory.
    """
    blocks: list[Tensor] = []
    spans: list[Tensor] = []
    structures: list[Structure | None] = []
    modes, filled = frozenset[str](), 0
    for chunk in chunks:
        content = chunk.content
        if not blocks or filled + len(content) > len(blocks[-1]):
            nbytes = max(len(content), expected_nbytes // 8 if blocks else expected_nbytes)
            check_fits("ram", Memory(nbytes), torch.device("cpu"), others=("cache",))
            blocks.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            filled = 0
        blocks[-1][filled : filled + len(content)] = content
        spans.append(_in_block(chunk.spans, len(blocks) - 1, filled))
        structures.append(chunk.structure)
        filled += len(content)
        modes |= chunk.image_modes
    return Samples(blocks, torch.cat(spans), modes, _common(structures))


def samples_in_file(
    chunks: Callable[[], Iterable[EncodedSamples]],
    size: int,
    structure: Structure,
    folder: Path,
    fingerprint: str | None,
) -> Samples:
    """All samples of some chunks, which `encode_samples` made of this structure; raises as `decode_once`.

    Args:
        size: how many samples there are.
        fingerprint: identifies them for other processes; None keeps them for this process alone.
    """
    modes = set[str]()

    def tensors() -> Iterator[tuple[Tensor, Tensor]]:
        filled = 0
        for chunk in chunks():
            modes.update(chunk.image_modes)
            yield chunk.content, _in_block(chunk.spans, 0, filled)
            filled += len(chunk.content)

    entry = decode_once(folder, fingerprint, size, tensors, lambda: {"image_modes": sorted(modes)}, FILES)
    content, spans = entry.tensors
    return Samples([content], spans, frozenset(entry.notes["image_modes"]), structure, is_mapped=True)


def _common(structures: Sequence[Structure | None]) -> Structure | None:
    """The structure that all of these are; None if they differ."""
    return structures[0] if all(structure == structures[0] for structure in structures) else None


def _in_block(spans: Tensor, block: int, start: int) -> Tensor:
    """The spans of a chunk as in `Samples`, whose bytes begin at `start` of a block."""
    return torch.cat([torch.full((len(spans), 1), block), spans + start], dim=1)


def _load_image_view(mode: str, size: tuple[int, int], content: Buffer) -> Tensor:
    """Uint8 `[C, H, W]` with its channels last in memory, for which torch resizes bytes fastest."""
    return torch.frombuffer(content, dtype=torch.uint8).view(size[1], size[0], -1).permute(2, 0, 1)


def _load_image_tensor(mode: str, size: tuple[int, int], content: Buffer) -> Tensor:
    return _load_image_view(mode, size, bytearray(content))
