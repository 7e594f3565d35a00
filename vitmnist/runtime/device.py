"""Selects the device of a run, and queues copies to it with streams, events and page-locked memory."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from vitmnist.errors import ConfigError, first_line
from vitmnist.runtime.cpu import limit_to_one_core
from vitmnist.runtime.world import SINGLE_PROCESS, World

log = logging.getLogger(__name__)


def choose_device(name: str, world: World = SINGLE_PROCESS) -> torch.device:
    """Return the device that `device=` names; `auto` is the current CUDA device, or the CPU if none can be used.

    The returned CUDA device has an index. With several ranks on a machine, it is the device of the local rank.

    Raises:
        ConfigError: this machine does not have that device, or fewer devices than ranks.
    """
    refuse_mps(name)
    if not re.fullmatch(r"auto|cpu|cuda(:[1-9]?\d)?", name):
        raise ConfigError(f"device={name}: unknown device; allowed: auto, cpu, cuda, cuda:0, cuda:1, …")
    count, is_available = torch.cuda.device_count(), torch.cuda.is_available()
    is_confined = world.size > 1 and name != "cpu" and _has_own_gpu(world, count if is_available else 0)
    is_auto = name == "auto"
    if is_auto:
        if count and not is_available:
            log.warning("device=auto: no GPU can be used: %s", _explain_unavailable_cuda())
        name = "cuda" if is_available else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if world.size > 1:
        if device.index is not None:
            raise ConfigError(f"device={name}: names one device for {world.size} processes; set device=cuda")
        device = torch.device("cuda", 0 if is_confined else world.local_rank)
    if not is_available:
        raise ConfigError(f"device={name}: {_explain_unavailable_cuda()}; set device=auto or device=cpu")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # `torch.cuda.set_device` needs an index.
    if device.index >= count:
        raise ConfigError(
            f"device={name}: torch sees {count} GPUs here, so rank {world.rank} cannot use {device}; set "
            "device=auto or device=cpu, and torchrun --nproc-per-node to the number of GPUs"
        )
    if reason := _explain_missing_kernels(device):
        if is_auto:
            log.warning("device=auto: the CPU is used, because %s", reason)
            return torch.device("cpu")
        raise ConfigError(f"device={name}: {reason}; set device=cpu, or install a torch for this GPU")
    return device


def refuse_mps(name: str) -> None:
    """Raise `ConfigError` for the GPU of a Mac."""
    if name.startswith("mps"):
        raise ConfigError("mps is not supported yet: float64 and measured times are missing there; set device=cpu")


def _has_own_gpu(world: World, count: int) -> bool:
    """Whether each rank sees a single GPU, and no other rank sees it, as where Slurm confines each task to a GPU."""
    ranks = world.all_gather_object([str(torch.cuda.get_device_properties(index).uuid) for index in range(count)])
    return all(len(uuids) == 1 for uuids in ranks) and len({uuids[0] for uuids in ranks}) == world.size


def _explain_missing_kernels(device: torch.device) -> str | None:
    """Why this build of torch cannot use a GPU; None if it has code for its compute capability."""
    architectures, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(device)
    builds = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(architectures))
    for kind, major, minor in builds:
        # Binary code runs on later GPUs with the same major number, and PTX (compute_…) on all later GPUs.
        built_for = int(major), int(minor)
        if built_for <= capability and (kind == "compute" or built_for[0] == capability[0]):
            return None
    if not builds:  # ROCm names its architectures differently.
        return None
    name = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    return f"{name}, and this torch has code for {', '.join(architectures)} only"


def _explain_unavailable_cuda() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = "torch sees no CUDA device here" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason += f": {first_line(error).split('. ')[0]}"
    return reason


Event = torch.cpu.Event | torch.cuda.Event
"""A point in the work of a stream."""


class DeviceQueue:
    """Copies batches to a device. In this base class, each call returns when its work is done.

    The "current stream" is the current stream of the calling thread.
    """

    is_async = False
    """True if the device has its own memory: copies are asynchronous, and consumers wait for them through an event."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Create a stream that can run at the same time as the current stream, and return a context that selects it."""
        return limit_to_one_core

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised host tensor from which the device can copy asynchronously."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def to_device(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; from pinned memory the host does not wait for it."""
        return tensor.to(self.device, non_blocking=True)

    def record_event(self) -> Event:
        """Record an event after everything queued on the current stream so far."""
        return torch.cpu.Event()

    def wait_event(self, event: Event) -> None:
        """Make later work of the current stream wait for `event`; the host does not wait."""

    def record_stream(self, tensor: Tensor) -> Tensor:
        """Keep a tensor's memory from being reused before the current stream is done with it; return the tensor."""
        return tensor


class CudaQueue(DeviceQueue):
    """Queues work on the streams of a CUDA device."""

    is_async = True

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        return partial(torch.cuda.stream, torch.cuda.Stream(self.device))

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(torch.cuda.current_stream(self.device))

    def record_stream(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor


QUEUES: dict[str, type[DeviceQueue]] = {"cpu": DeviceQueue, "cuda": CudaQueue}


def create_queue(device: torch.device) -> DeviceQueue:
    """Create the queue for the type of a device."""
    return QUEUES[device.type](device)


@contextmanager
def set_float32_precision(use_tf32: bool = False) -> Iterator[None]:
    """Compute float32 matrix products and convolutions in float32 or in TF32; torch's own defaults for them differ."""
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = use_tf32
        yield


def use_deterministic_kernels(deterministic: bool | str, device: torch.device) -> None:
    """Make a GPU sum in the same order each time: a resumed run then repeats every bit.

    Otherwise the gradients of some convolutions and of attention vary in their last bits. Operations without a
    deterministic implementation raise `RuntimeError`: with `warn_only`, torch would leave attention nondeterministic.

    Args:
        deterministic: `trainer.deterministic`; `auto` is true on a GPU. On the CPU, kernels repeat every bit anyway.
    """
    is_gpu = device.type == "cuda"
    torch.use_deterministic_algorithms(is_gpu if deterministic == "auto" else bool(deterministic))
    if is_gpu and not deterministic:
        log.info("trainer.deterministic=false: if this run is resumed, it may differ by rounding")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Torch reads it at the first matrix product.
    # Filling uninitialised memory would cost a kernel per tensor, and nothing here reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
