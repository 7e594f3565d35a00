"""The device that a configuration names, and its backend: the streams, events and page-locked memory of loaders."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from vitmnist.errors import ConfigError, first_line
from vitmnist.runtime.cpu import limit_to_one_core
from vitmnist.runtime.world import SINGLE_PROCESS, World

log = logging.getLogger(__name__)


def choose_device(name: str, world: World = SINGLE_PROCESS, sees_its_own: bool = False) -> torch.device:
    """The device that `device=` names; `auto` is the first CUDA device, or the CPU.

    With several ranks on a machine, each gets its own CUDA device.

    Args:
        sees_its_own: the launcher shows this rank other devices than the other ranks of its machine.

    Raises:
        ConfigError: this machine does not have that device, or not enough of them.
    """
    count, is_available = torch.cuda.device_count(), torch.cuda.is_available()
    if name == "auto":
        if count and not is_available:
            log.warning("device=auto: no GPU can be used: %s", _why_unavailable())
        name = "cuda" if is_available else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device={name}: not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, …")
    if device.type == "cpu":
        return device
    if world.size > 1:
        if device.index is not None:
            raise ConfigError(f"device={name}: names one device for {world.size} processes; set device=cuda")
        index = 0 if sees_its_own and count == 1 else world.local_rank
        if index >= count:
            raise ConfigError(
                f"device={name}: rank {world.rank} has no GPU: torch sees {count or 'none'} here; start as many "
                "processes as there are GPUs with torchrun --nproc-per-node, or set device=cpu"
            )
        return torch.device("cuda", index)
    if not is_available:
        raise ConfigError(f"device={name}: {_why_unavailable()}; set device=auto or device=cpu")
    if (device.index or 0) >= count:
        raise ConfigError(f"device={name}: torch sees {count} CUDA devices here; set device=auto or device=cpu")
    return device


def _why_unavailable() -> str:
    """Why torch cannot use CUDA: no driver, one that is too old, a variable that hides the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch sees no CUDA device here{hidden}: {first_line(error).split('. ')[0]}"
    return f"torch sees no CUDA device here{hidden}"


class Backend(ABC):
    """The operations of a device that loaders need.

    Streams and events are opaque to the caller. "The current stream" is the stream of the calling thread.
    """

    is_async: bool
    """Whether the device has its own memory, so that a batch must be copied and the copy waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream whose work may overlap the work of the current stream."""

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
