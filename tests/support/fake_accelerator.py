"""A device that exists in Python only, and is as late and as early as a real one may be.

What is queued on a stream happens when somebody waits for it, and not before; except where a freed block is used again,
which happens at once. A program that forgets to wait reads poison; one that frees too early has its data poisoned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitmnist.runtime.device import Accelerator

POISON = 0xDD


class Stream:
    """Work in the order in which it was given, done up to a point."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class FakeAccelerator(Accelerator):
    """Keeps the promises of CUDA's streams and allocator, and no more than those."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.default = Stream()
        self.streams = [self.default]
        self.made_pinned = 0
        self.host_waits = 0
        self._current = threading.local()
        self._pinned: list[Tensor] = []
        self._blocks: dict[int, tuple[Tensor, Stream, list[tuple[Stream, int]]]] = {}
        self._lock = threading.RLock()

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def working_on(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._lock:
            self.made_pinned += 1
            self._pinned.append(torch.empty(shape, dtype=dtype))
            return self._pinned[-1]

    def upload(self, tensor: Tensor) -> Tensor:
        with self._lock:
            ranges = [range(block.data_ptr(), block.data_ptr() + max(block.nbytes, 1)) for block in self._pinned]
            if not any(tensor.data_ptr() in whole for whole in ranges):
                # Not page-locked: the driver copies it aside before the call returns, as it does in truth.
                tensor = tensor.clone()
            block = torch.empty_like(tensor)
            _poison(block)
            stream = self.current
            stream.work.append(lambda: block.copy_(tensor))
            handed_out = block.view(block.shape)
            self._blocks[id(handed_out)] = block, stream, []
            weakref.finalize(handed_out, self._free, id(handed_out))
            return handed_out

    def event(self) -> tuple[Stream, int]:
        with self._lock:
            return self.current, len(self.current.work)

    def wait(self, event: tuple[Stream, int]) -> None:
        with self._lock:
            stream, position = event
            self.current.work.append(lambda: stream.run(position))

    def hold(self, tensor: Tensor) -> None:
        with self._lock:
            self._blocks[id(tensor)][2].append((self.current, 0))

    def reached(self, event: tuple[Stream, int]) -> bool:
        stream, position = event
        return stream.done >= position

    def synchronize(self, event: tuple[Stream, int]) -> None:
        with self._lock:
            self.host_waits += 1
            event[0].run(event[1])

    def read(self, tensor: Tensor, into: list[Any]) -> None:
        """What a kernel does: queued on the current stream, it reads the memory when its turn comes."""
        with self._lock:
            block = self._blocks[id(tensor)][0]
            self.current.work.append(lambda: into.append(block.clone()))

    def finish(self) -> None:
        """Let every stream do all it was given."""
        with self._lock:
            for stream in self.streams:
                stream.run(len(stream.work))

    def _free(self, key: int) -> None:
        with self._lock:
            block, stream, holders = self._blocks.pop(key)
            # The allocator waits for the streams that hold the block, and for no other: the next to get the block is
            # work on its own stream, and that may come at once.
            position = len(stream.work)
            waits = [(holder, len(holder.work)) for holder, _ in holders]

            def use_again() -> None:
                for holder, until in waits:
                    holder.run(until)
                _poison(block)

            stream.work.append(use_again)
            # On the consumer's own stream it comes after what the consumer queued there, however late that is.
            if not waits and stream is not self.default:
                stream.run(position + 1)


def _poison(block: Tensor) -> None:
    if block.numel():
        block.view(torch.uint8).fill_(POISON)
