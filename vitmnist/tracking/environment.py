"""Describes the machine and the software of a run, and measures its peak memory."""

import platform
from importlib.metadata import version
from typing import Any

import torch

import vitmnist
from vitmnist.metrics.epoch_table import GPU_PEAK_MIB, HOST_PEAK_MIB
from vitmnist.runtime.cpu import available_cores, read_cpuinfo
from vitmnist.runtime.memory import read_host_peak, reset_host_peak

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
"""The packages whose versions are recorded."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return processor, GPU, versions and settings; unknown values are None."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": read_cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of host and GPU, because a sweep runs its jobs in one process."""
    reset_host_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure_peak_memory(device: torch.device) -> dict[str, float | None]:
    """Return the peak memory of host and GPU since `reset_peak_memory` in MiB; None without a GPU."""
    return {
        HOST_PEAK_MIB.name: read_host_peak() / 2**20,
        GPU_PEAK_MIB.name: torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
    }
