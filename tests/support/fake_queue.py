"""A device in Python that works as late, and frees as early, as CUDA allows.

Work queued on a stream is done when somebody waits for it, and not before; except that a freed block is reused at once.
A program that forgets to wait reads poison; one that frees too early has its data poisoned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vitmnist.runtime.device import DeviceQueue

POISON = 0xDD


class Stream:
    """Work in the order in which it was queued, done up to a point."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class Event(NamedTuple):
    """A position in the work of a stream."""

    stream: Stream
    position: int
    lock: threading.RLock

    def synchronize(self) -> None:
        with self.lock:
            self.stream.run(self.position)


class DeviceTensor(Tensor):
    """A tensor of the device. A gather is queued on the current stream. A slice keeps its memory alive."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    queue: FakeQueue

    def index_select(self, dim: int, index: Tensor) -> DeviceTensor:
        source = self.as_subclass(Tensor)
        block, selected = self.queue.allocate((len(index), *self.shape[1:]), self.dtype)
        self.queue.enqueue(lambda: block.copy_(source.index_select(dim, index)))
        return selected

    def __getitem__(self, rows: slice) -> DeviceTensor:
        view = self.as_subclass(Tensor)[rows].as_subclass(DeviceTensor)
        view.owner = self
        return view


class FakeQueue(DeviceQueue):
    """Guarantees what CUDA's streams and allocator guarantee, and nothing more."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.default = Stream()
        self.streams = [self.default]
        self.copies = self.most_copies = self.most_blocks = self.pageable_copies = 0
        self._current = threading.local()
        self._pinned: list[Tensor] = []
        self._blocks: dict[int, tuple[Tensor, Stream, list[Stream]]] = {}
        self._freed: list[list[tuple[Stream, int]]] = []  # The reuse of each freed block waits for these positions.
        self._lock = threading.RLock()

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    def new_stream(self) -> Callable[[], AbstractContextManager[None]]:
        self.streams.append(Stream())
        return partial(self._use, self.streams[-1])

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = before

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._lock:
            self._pinned.append(torch.empty(shape, dtype=dtype))
            return self._pinned[-1]

    def to_device(self, tensor: Tensor) -> Tensor:
        with self._lock:
            ranges = [range(block.data_ptr(), block.data_ptr() + max(block.nbytes, 1)) for block in self._pinned]
            if not any(tensor.data_ptr() in addresses for addresses in ranges):
                self.pageable_copies += 1
                tensor = tensor.clone()  # From pageable memory the driver copies before the call returns.
            block, on_device = self.allocate(tensor.shape, tensor.dtype)
            self.copies += 1
            self.most_copies = max(self.most_copies, self.copies)

            def copy() -> None:
                block.copy_(tensor)
                self.copies -= 1

            self.enqueue(copy)
            return on_device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, DeviceTensor]:
        """A block of memory of the current stream, and the tensor whose last reference frees it."""
        with self._lock:
            block = torch.empty(shape, dtype=dtype)
            _poison(block)
            tensor = block.as_subclass(DeviceTensor)
            tensor.queue = self
            self._blocks[id(tensor)] = block, self.current, []
            weakref.finalize(tensor, self._free, id(tensor))
            self._freed = [waits for waits in self._freed if any(other.done < until for other, until in waits)]
            self.most_blocks = max(self.most_blocks, len(self._blocks) + len(self._freed))
            return block, tensor

    def enqueue(self, work: Callable[[], object]) -> None:
        """Queue a kernel on the current stream."""
        with self._lock:
            self.current.work.append(work)

    def record_event(self) -> Event:
        with self._lock:
            return Event(self.current, len(self.current.work), self._lock)

    def wait_event(self, event: Event) -> None:
        with self._lock:
            self.current.work.append(lambda: event.stream.run(event.position))

    def record_stream(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self._blocks[id(getattr(tensor, "owner", tensor))][2].append(self.current)
        return tensor

    def read(self, tensor: Tensor, into: list[Any]) -> None:
        """Queue a kernel that reads the tensor's memory on the current stream."""
        with self._lock:
            values = tensor.as_subclass(Tensor)  # The last reference to `tensor` itself frees its memory.
            self.enqueue(lambda: into.append(values.clone()))

    def finish(self) -> None:
        """Run all work of every stream. Loaders come first, because only an event makes them wait for the consumer."""
        with self._lock:
            for stream in reversed(self.streams):
                stream.run(len(stream.work))

    def _free(self, key: int) -> None:
        with self._lock:
            block, stream, recorded = self._blocks.pop(key)
            # The allocator waits for the recorded streams only; the next owner's work on the block's own stream may
            # then come at once.
            position = len(stream.work)
            waits = [(other, len(other.work)) for other in recorded]
            self._freed.append(waits)

            def reuse() -> None:
                for other, until in waits:
                    other.run(until)
                _poison(block)

            stream.work.append(reuse)
            # On the consumer's own stream, the reuse always follows the consumer's work.
            if not waits and stream is not self.default:
                stream.run(position + 1)


def _poison(block: Tensor) -> None:
    if block.numel():
        block.view(torch.uint8).fill_(POISON)


def simulate_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    current: int = 0,
    capability: tuple[int, int] = (9, 0),
    architectures: str = "sm_90",
) -> None:
    """Let torch report GPUs that do not exist. Their `uuid` is their index."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    answers = {
        "is_available": True,
        "device_count": count,
        "current_device": current,
        "get_device_capability": capability,
        "get_device_name": "A GPU",
        "get_arch_list": architectures.split(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
