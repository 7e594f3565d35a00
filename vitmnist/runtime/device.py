"""The device of a run, and the streams, events and page-locked memory that loaders need of it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from vitmnist.errors import ConfigError, first_line
from vitmnist.runtime.world import SINGLE_PROCESS, World

log = logging.getLogger(__name__)


class Accelerator:
    """The CPU: host and device memory are the same, so nothing is copied and nothing has to wait.

    Streams and events are opaque to the caller. "The current stream" is that of the calling thread.
    """

    is_async = False
    """Whether the device has its own memory, so that a batch must be copied and the copy waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> Any:
        """A stream whose work may overlap that of the current stream."""
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` current for this thread. On the CPU the thread is limited to one core."""
        return _one_core()

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor from which the device can copy asynchronously."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def to_device(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; from pinned memory the host does not wait for it."""
        return tensor.to(self.device)

    def record_event(self) -> Any:
        """An event after everything queued on the current stream so far."""
        return None

    def wait_event(self, event: Any) -> None:
        """Let later work of the current stream start after `event`; the host does not wait."""

    def record_stream(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being reused before the current stream is done with it."""

    def is_done(self, event: Any) -> bool:
        """Whether the device has passed `event`."""
        return True

    def synchronize(self, event: Any) -> None:
        """Block the host until the device has passed `event`."""

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        """Capture `work` as a graph, and return the function that replays it on the same tensors.

        The caller keeps these alive: the graph has only their addresses.

        On the CPU there are no graphs, and `work` itself is returned.

        Args:
            warm_up: how often to call `work` before, so that libraries initialise themselves outside of the graph; at
                least 1. The capture itself executes nothing on the device.

        Raises:
            RuntimeError: `work` does something that cannot be captured, such as reading a value back.
        """
        for _ in range(warm_up):
            work()
        return work


class Cuda(Accelerator):
    """A CUDA device."""

    is_async = True

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

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
                    # Work that waits for the device fails here. A capture that it broke off would leave the allocator
                    # of torch 2.11 and older in the middle of it, and any later capture would fail.
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


ACCELERATORS: dict[str, type[Accelerator]] = {"cpu": Accelerator, "cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator for a device."""
    return ACCELERATORS[device.type](device)


def choose_device(name: str, world: World = SINGLE_PROCESS) -> torch.device:
    """The device that `device=` names; `auto` is the first CUDA device, or the CPU.

    With several ranks on a machine, each gets its own CUDA device.

    Raises:
        ConfigError: this machine does not have that device, or not enough of them.
    """
    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available() and name == "auto":
        log.warning("device=auto: no GPU can be used: %s", _why_unavailable())
    if world.size > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        if world.local_rank >= count:
            raise ConfigError(
                f"device={name}: rank {world.rank} has no GPU: torch sees {count or 'none'} here; start as many "
                "processes as there are GPUs with torchrun --nproc-per-node, or type device=cpu"
            )
        return torch.device("cuda", world.local_rank)
    if world.size > 1 and name.startswith("cuda:"):
        raise ConfigError(f"device={name}: names one device for {world.size} processes; type device=cuda")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device={name}: not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, …")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: {_why_unavailable()}; type device=auto or device=cpu")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name}: torch sees {count} CUDA device{'' if count == 1 else 's'} here; "
            "type device=auto or device=cpu"
        )
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


@contextmanager
def _one_core() -> Iterator[None]:
    """Limit torch to one core in this thread.

    Each computing thread gets its own OpenMP team. A second team next to the model's, on the same two cores, made an
    epoch 7% longer (ratio of prefetched `ram` to `ram` 1.072; with one core 1.001).
    """
    torch.get_num_threads()  # torch initialises a new thread to all cores at first use, which would undo the limit
    with threadpool_limits(1, user_api="openmp"):
        yield
