"""Machine, software and source code of a run: timings without them cannot be compared."""

from __future__ import annotations

import contextlib
import hashlib
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
    """The commit of a source tree, whether it has uncommitted changes, and a checksum of them.

    All None if `root` is not the top of a git repository, as in an installed package.
    """

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout

    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = git("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        untracked = [name for name in git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0") if name]
    except (OSError, subprocess.SubprocessError):
        top = b""
    if Path(os.fsdecode(top)) != root.resolve():
        return {"git_commit": None, "git_dirty": None, "git_diff_sha256": None}
    dirty = bool(changes or untracked)
    checksum = hashlib.sha256(changes)
    for name in sorted(untracked):
        with contextlib.suppress(OSError):  # deleted meanwhile, or a dangling link
            checksum.update(name + hashlib.sha256((root / os.fsdecode(name)).read_bytes()).digest())
    sha256 = checksum.hexdigest() if dirty else None
    return {"git_commit": commit.decode(), "git_dirty": dirty, "git_diff_sha256": sha256}
