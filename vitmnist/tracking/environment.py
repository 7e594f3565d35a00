"""Machine, software and source code of a run: timings without them cannot be compared."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pynvml
import torch

import vitmnist
from vitmnist.runtime.cpu import available_cores, cpuinfo
from vitmnist.tracking.hardware import gpu_handle

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
# Prefixes of the environment variables that change times or results.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_"),
)
SET_BY_TORCH = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")  # when it is imported
SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")
LIBRARIES = re.compile(r"BLAS_INFO=\w+|Math Kernel Library Version [\d.]+|MKL-DNN v[\d.]+")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, driver, settings, and the commit of this program; None where there is none."""
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
        "blas": ", ".join(LIBRARIES.findall(torch.__config__.show())),
        "env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name not in SET_BY_TORCH and not SECRET.search(name)
        },
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_driver": str(pynvml.nvmlSystemGetDriverVersion()) if gpu_handle(device) is not None else None,
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
