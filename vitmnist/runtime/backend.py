"""The backend of a device: the streams, events and page-locked memory that loaders need of it, and captured graphs."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor


class Backend(ABC):
    """The operations of a device that loaders and captured steps need.

    Streams and events are opaque to the caller. "The current stream" is that of the calling thread.
    """

    is_async: bool
    """Whether the device has its own memory, so that a batch must be copied and the copy waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream whose work may overlap that of the current stream."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` current for this thread."""

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor from which the device can copy asynchronously."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def to_device(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; from pinned memory the host does not wait for it."""
        return tensor.to(self.device, non_blocking=True)

    @abstractmethod
    def record_event(self) -> Any:
        """An event after everything queued on the current stream so far."""

    @abstractmethod
    def wait_event(self, event: Any) -> None:
        """Let later work of the current stream start after `event`; the host does not wait."""

    @abstractmethod
    def record_stream(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being reused before the current stream is done with it."""

    @abstractmethod
    def is_done(self, event: Any) -> bool:
        """Whether the device has passed `event`."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Block the host until the device has passed `event`."""

    @abstractmethod
    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        """Capture `work` as a graph, and return the function that replays it on the same tensors.

        The caller keeps these alive: the graph has only their addresses.

        Args:
            warm_up: how often to call `work` before, so that libraries initialise themselves outside of the graph; at
                least 1. The capture itself executes nothing on the device.

        Raises:
            RuntimeError: `work` does something that cannot be captured, such as reading a value back.
        """


class CpuBackend(Backend):
    """Host and device memory are the same: nothing is copied, and there is nothing to wait for."""

    is_async = False

    def new_stream(self) -> None:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return limit_to_one_core()

    def record_event(self) -> Any:
        return None

    def wait_event(self, event: Any) -> None:
        pass

    def record_stream(self, tensor: Tensor) -> None:
        pass

    def is_done(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        pass

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        for _ in range(warm_up):
            work()
        return work  # the CPU has no graphs


class CudaBackend(Backend):
    """A CUDA device."""

    is_async = True

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def record_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        current, side = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.device(self.device):
            try:
                with torch.cuda.stream(side):
                    for _ in range(warm_up - 1):
                        work()
                    # Work that waits for the device must fail here, not in the capture: in torch 2.11 and older the
                    # allocator never leaves a capture that was broken off, so that any later one fails.
                    with _waiting_is_an_error():
                        work()
                return _captured(work, side)
            finally:
                torch.cuda.set_stream(current)  # torch 2.11 leaves `side` current when a capture fails
                current.wait_stream(side)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream(device)


def _captured(work: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], object]:
    graph, failed = torch.cuda.CUDAGraph(), None
    try:
        # thread_local: a thread that uploads batches may allocate memory meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                work()
            except Exception as error:
                failed = error
                raise
    except RuntimeError as error:
        raise failed or error from None  # ending a capture that failed raises its own error, which hides the first
    return graph.replay


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


BACKENDS: dict[str, type[Backend]] = {"cpu": CpuBackend, "cuda": CudaBackend}


def backend_of(device: torch.device) -> Backend:
    """The backend of a device."""
    return BACKENDS[device.type](device)


def limit_to_one_core() -> AbstractContextManager[Any]:
    """Limit torch to one core in this thread, from now on, or to the end of a `with` block.

    Each computing thread gets its own OpenMP team. A second team next to the model's, on the same two cores, made an
    epoch 7% longer (ratio of prefetched `ram` to `ram` 1.072; with one core 1.001).
    """
    torch.get_num_threads()  # torch initialises a new thread to all cores at first use, which would undo the limit
    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="openmp")
    return limits
