"""Describes the machine and the software of a run, and measures its peak memory."""

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import vitmnist
from vitmnist.metrics.epoch_table import GPU_PEAK_MIB, HOST_PEAK_MIB
from vitmnist.runtime.cpu import available_cores, read_cpuinfo
from vitmnist.runtime.memory import read_host_peak, reset_host_peak

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
"""The packages whose versions are recorded."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Describe processor, GPU, versions, settings and the commit of this program; unknown values are None."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: _find_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": read_cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **read_source_state(Path(vitmnist.__file__).parent.parent),
    }


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # The package can be installed under another name, such as `tb-nightly`.
        return None


def read_source_state(root: Path) -> dict[str, Any]:
    """Return the commit of a source tree and whether it has changes; both are None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=10, encoding="utf-8").stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")) == root.resolve():
            return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    return {"git_commit": None, "git_dirty": None}


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure peak memory. A sweep runs its jobs in one process, and each job has its own peak."""
    reset_host_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure_peak_memory(device: torch.device) -> dict[str, float | None]:
    """Return the peak memory of host and GPU since `reset_peak_memory` in MiB; None without a GPU."""
    return {
        HOST_PEAK_MIB.name: read_host_peak() / 2**20,
        GPU_PEAK_MIB.name: torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
    }
