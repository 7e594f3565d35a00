"""The machine of a run: its hardware, software and source code, and how much of the hardware the run uses.

Timings without them cannot be compared. None stands for what this machine cannot measure.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
import torch

import vitmnist
from vitmnist.runtime.cpu import CpuClock, available_cores, cpuinfo
from vitmnist.runtime.memory import host_memory, reset_host_peak

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
# Environment variables with these prefixes change times or results.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_"),
)
SET_BY_TORCH = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")  # `import torch` sets them.
MIB = 2**20
SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, driver, settings, and the commit of this program; None where there is none."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name not in SET_BY_TORCH and not SECRET.search(name)
        },
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_driver": str(pynvml.nvmlSystemGetDriverVersion()) if gpu_handle(device) is not None else None,
        **source_state(Path(vitmnist.__file__).parent.parent),
    }


def package_version(name: str) -> str | None:
    """The version of a distribution; None if the package comes from one of another name, as nightly builds do."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


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


def gpu_handle(device: torch.device) -> object:
    """The driver's (NVML's) handle of a CUDA device; None for other devices."""
    if device.type == "cuda":
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            # By UUID, because CUDA_VISIBLE_DEVICES renumbers devices for torch but not for the driver.
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


class HardwareFigures:
    """Peak memory, and use of the GPU and the processor, since construction."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, gpu_handle(device)
        self._read_until = int(time.time() * 1_000_000)  # microseconds, the driver's unit
        self._busy = self._samples = 0
        self._cpu_clock = CpuClock()
        # A sweep runs its jobs in one process: a peak must not include the jobs before.
        self._host_reset = reset_host_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float | None]:
        """The metrics of an epoch that are not about time; docs/records.md describes them."""
        is_cuda = self._device.type == "cuda"
        return {
            "host_peak_mib": host_memory("VmHWM") / MIB if self._host_reset else None,
            "gpu_peak_mib": torch.cuda.max_memory_allocated(self._device) / MIB if is_cuda else None,
            "cores_busy": self._cpu_clock.cores().busy,
            "gpu_util_pct": self.gpu_util_pct(),
        }

    def gpu_util_pct(self) -> float | None:
        """Mean share of time in which a kernel ran, in percent, over the driver's samples so far.

        Not of an epoch alone, which may be shorter than the time between two samples.
        """
        if self._gpu is not None:
            with contextlib.suppress(pynvml.NVMLError):
                kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
                _, samples = pynvml.nvmlDeviceGetSamples(self._gpu, kind, self._read_until)  # newer than this
                self._busy += sum(sample.sampleValue.uiVal for sample in samples)
                self._samples += len(samples)
                self._read_until = max([self._read_until, *(sample.timeStamp for sample in samples)])
        return self._busy / self._samples if self._samples else None
