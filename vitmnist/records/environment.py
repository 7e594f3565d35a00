"""What a run ran on: a figure without its machine and versions cannot be compared."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
import torch

import vitmnist
from vitmnist.records.hardware import gpu_handle

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, driver, and the commit of this program; null where there is no such thing."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_driver": _driver(device),
        **_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str | None:
    return str(pynvml.nvmlSystemGetDriverVersion()) if gpu_handle(device) is not None else None


def _commit() -> dict[str, Any]:
    """The commit of the source tree and whether it was dirty; nulls where the program was installed without one."""
    root = Path(vitmnist.__file__).parent.parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    if git("rev-parse", "--show-toplevel") != str(root.resolve()):
        return {"git_commit": None, "git_dirty": None}
    status = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if status is None else bool(status)}
