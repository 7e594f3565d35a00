"""Stores samples of any structure and size as bytes, in memory or in a mapped file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import DataError
from vitmnist.runtime.memory import check_fits
from vitmnist.store.cache_file import open_or_write_cache
from vitmnist.store.image_codec import Buffer, load_image, load_image_tensor
from vitmnist.store.json_codec import decode_json, encode_as_json
from vitmnist.store.pickle_codec import SampleUnpickler, pickle_sample


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as bytes: pickled, or without pickle if they are in a file, which anyone can have written.

    Args:
        blocks: the bytes of the samples, as one or more uint8 tensors.
        spans: int64 `[N, 3]`: for each sample the index of its block, and its start and stop there.
        is_json: the samples are encoded without pickle.
        as_tensors: load images as uint8 tensors `[C, H, W]`; an image of another depth then raises `DataError`.
    """

    blocks: Sequence[Tensor]
    spans: Tensor
    is_json: bool
    as_tensors: bool = False

    def load(self, index: int, as_views: bool = False) -> Any:
        """Load a sample; with `as_views`, its tensors, arrays and images can be views: do not modify them."""
        if isinstance(index, tuple) or index < 0:  # The original might not count from the end.
            last = len(self.spans) - 1
            raise DataError(f"the sampler gives {index}, not only 0 to {last}; use the DataLoader as it is")
        block, start, stop = self.spans[index].tolist()
        content = self.blocks[block][start:stop].numpy().data
        load = partial(load_image_tensor, as_view=as_views) if self.as_tensors else load_image
        head, *buffers = _unpack(content)
        if self.is_json:
            return decode_json(json.loads(bytes(head)), iter(buffers), load, as_views)
        return SampleUnpickler(head, buffers, load, as_views).load()


def encode_samples(samples: Iterable[object], as_json: bool) -> EncodedSamples:
    """Encode samples as one block of bytes, pickled or as JSON; raises `DataError` if a sample cannot be encoded."""
    content, spans = bytearray(), []
    for sample in samples:
        start = len(content)
        parts = encode_as_json(sample) if as_json else pickle_sample(sample)
        for part in _pack(parts):
            content += part
        spans.append((0, start, len(content)))
    return EncodedSamples([torch.frombuffer(content, dtype=torch.uint8)], torch.tensor(spans), as_json)


def store_samples_in_memory(chunks: Iterable[EncodedSamples], expected_nbytes: int) -> EncodedSamples:
    """Collect the samples of chunks of one block each; raises `OutOfSpaceError` if there is too little memory."""
    blocks: list[Tensor] = []
    spans: list[Tensor] = []
    needed = expected_nbytes
    for chunk in chunks:
        check_fits("ram", needed, torch.device("cpu"))
        spans.append(chunk.spans + torch.tensor([len(blocks), 0, 0]))
        # Copy it: a block from a worker holds a file descriptor and scarce shared memory.
        blocks.append(chunk.blocks[0].clone())
        needed = max(needed - blocks[-1].nbytes, blocks[-1].nbytes)
    return EncodedSamples(blocks, torch.cat(spans), is_json=False)


def store_samples_in_file(
    chunks: Callable[[], Iterable[EncodedSamples]], size: int, folder: Path, fingerprint: str | None
) -> EncodedSamples:
    """Write chunks of samples that are encoded as JSON into a cache; see `open_or_write_cache`."""

    def chunks_of_tensors() -> Iterator[tuple[Tensor, Tensor]]:
        filled = 0
        for chunk in chunks():
            yield chunk.blocks[0], chunk.spans + torch.tensor([0, filled, filled])
            filled += len(chunk.blocks[0])

    (content, spans), _ = open_or_write_cache(folder, fingerprint, size, chunks_of_tensors, names=("samples", "spans"))
    return EncodedSamples([content], spans, is_json=True)


def _pack(parts: Sequence[Buffer]) -> list[Buffer]:
    """Prefix the parts of a sample with their count and sizes."""
    sizes = [memoryview(part).nbytes for part in parts]
    return [struct.pack(f"<{len(sizes) + 1}q", len(sizes), *sizes), *parts]


def _unpack(content: memoryview) -> list[memoryview]:
    """Return views of the parts of a sample that `_pack` prefixed."""
    (count,) = struct.unpack_from("<q", content)
    sizes = struct.unpack_from(f"<{count}q", content, 8)
    bounds = accumulate(sizes, initial=8 * (1 + count))
    return [content[start:stop] for start, stop in pairwise(bounds)]
