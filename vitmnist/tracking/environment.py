"""The machine of a run: its hardware, software and source code, and how much memory the run uses.

Timings without them cannot be compared. None stands for what this machine cannot measure.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import vitmnist
from vitmnist.metrics.epoch_table import GPU_PEAK_MIB, HOST_PEAK_MIB
from vitmnist.runtime.cpu import available_cores, cpuinfo
from vitmnist.runtime.memory import host_peak, reset_host_peak

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
VARIABLES = re.compile(
    "ATEN_CPU_CAPABILITY|LD_PRELOAD|NVIDIA_TF32_OVERRIDE"
    "|(CUBLAS|CUDA|DNNL|GOMP|KMP|MALLOC|MKL|NCCL|OMP|ONEDNN|OPENBLAS|PYTORCH|TORCH|TORCHINDUCTOR)_"
)
"""Environment variables whose names begin so change times or results."""
SET_BY_TORCH = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")  # `import torch` sets them.
SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")
MIB = 2**20


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, settings, and the commit of this program; None where there is none."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if VARIABLES.match(name) and name not in SET_BY_TORCH and not SECRET.search(name)
        },
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **source_state(Path(vitmnist.__file__).parent.parent),
    }


def source_state(root: Path) -> dict[str, Any]:
    """The commit of a source tree, and whether it has uncommitted changes; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=10, text=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) == root.resolve():
            return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"git_commit": None, "git_dirty": None}


class PeakMemory:
    """The highest use of memory since construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A sweep runs its jobs in one process: a peak must not include the jobs before.
        self._has_host_peak = reset_host_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float | None]:
        """The metrics of an epoch that are about memory; docs/records.md describes them."""
        is_cuda = self._device.type == "cuda"
        return {
            HOST_PEAK_MIB.name: host_peak() / MIB if self._has_host_peak else None,
            GPU_PEAK_MIB.name: torch.cuda.max_memory_allocated(self._device) / MIB if is_cuda else None,
        }
