"""The run's device, and what the loaders ask of it: streams, events, page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from vitmnist.errors import ConfigError
from vitmnist.runtime.distributed import ALONE, SingleProcess


class Accelerator:
    """The CPU's: host and device are one, nothing is copied and nothing has to wait.

    Streams and events are opaque to the caller; "the current stream" is the calling thread's.
    """

    is_async = False
    """Whether the device has memory of its own, so that a batch must be copied and the copy waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Any:
        """A stream to put work on that is to run beside the current one."""
        return None

    def working_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within, what this thread queues goes to `stream`. On the CPU the thread keeps to one core."""
        return _one_core()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from by itself."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def upload(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; from pinned memory the host does not wait for it."""
        return tensor

    def event(self) -> Any:
        """A mark behind everything that the current stream was given so far."""
        return None

    def wait(self, event: Any) -> None:
        """What the current stream is given from now on begins after `event`; the host goes on."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being used again before the current stream is done with it."""

    def reached(self, event: Any) -> bool:
        """Whether the device has passed `event`."""
        return True

    def synchronize(self, event: Any) -> None:
        """Let the host wait until the device has passed `event`."""

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        """What replays `work` on the tensors that it works on now; on the CPU nothing is saved by it, and it is `work`.

        Args:
            warm_up: how often to do it before, so that libraries have set themselves up. The recording itself does
                nothing on the device.
        """
        for _ in range(warm_up):
            work()
        return work


class Cuda(Accelerator):
    """A CUDA device."""

    is_async = True

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def working_on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def hold(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def reached(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        current, beside = torch.cuda.current_stream(self.device), self.stream()
        beside.wait_stream(current)
        try:
            with torch.cuda.stream(beside):
                for _ in range(warm_up):
                    work()
            # The stream is of this device; torch's own one for recordings may be of another.
            with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=beside):
                work()
        finally:
            current.wait_stream(beside)
        return graph.replay


ACCELERATORS: dict[str, type[Accelerator]] = {"cpu": Accelerator, "cuda": Cuda}


def choose_device(name: str, world: SingleProcess = ALONE) -> torch.device:
    """The device that `device=` names; `auto` is the first CUDA device, or the CPU.

    Each of several ranks on a machine has a CUDA device of its own.

    Raises:
        ConfigError: no such device on this machine, or not as many.
    """
    if world.size > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        count = torch.cuda.device_count()
        if world.local_rank >= count:
            raise ConfigError(
                f"device={name}: rank {world.rank} has no GPU: torch sees {count or 'none'} here, for "
                f"{world.local_world_size} processes; start as many as there are GPUs with torchrun --nproc-per-node, "
                "or type device=cpu"
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
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name}: torch sees {count or 'no'} CUDA device{'' if count == 1 else 's'} here; "
            "type device=auto or device=cpu"
        )
    return device


def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator that stands for a device."""
    return ACCELERATORS[device.type](device)


@contextmanager
def _one_core() -> Iterator[None]:
    """Let torch use a single core in this thread.

    OpenMP gives each thread that computes a team of its own. A second team beside the model's, on the same two cores,
    made an epoch 7% longer (ratio of prefetched `ram` to `ram` 1.072; with one core 1.001).
    """
    torch.get_num_threads()  # at its first question torch gives a new thread all cores; later that would undo the limit
    with threadpool_limits(1, user_api="openmp"):
        yield
