"""The backend of a device: the streams, events and page-locked memory that loaders need of it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor


class Backend(ABC):
    """The operations of a device that loaders need.

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
    limits: AbstractContextManager[Any] = _openmp().limit(limits=1, user_api="openmp")
    return limits


@cache
def _openmp() -> ThreadpoolController:
    """Found once: looking for the loaded libraries takes a millisecond."""
    return ThreadpoolController()


def one_core_each() -> Callable[[], AbstractContextManager[Any]]:
    """The context of threads that decode next to a training step; while the first lives, idle cores do not spin."""
    first = iter((stop_idle_spinning,))

    def enter() -> AbstractContextManager[Any]:
        next(first, int)()
        return limit_to_one_core()

    return enter


def stop_idle_spinning() -> None:
    """Let idle OpenMP threads sleep at once, in the whole process and as long as the calling thread lives.

    After each operation of torch on several cores, GNU's OpenMP (libgomp) lets its threads spin for 5 to 10 ms, on
    cores that other threads need: where two threads read pictures of 64×64 next to a training step, a picture took 1.7
    ms of processor time, and 1.2 ms without. It does not where there are more OpenMP threads than cores, which
    a second team sees to: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    if torch.get_num_threads() > 1:
        cores = os.cpu_count() or 1
        with _openmp().limit(limits=cores, user_api="openmp"):
            torch.zeros(cores * 2**16, device="cpu").add_(1)  # large enough for a thread on each core
