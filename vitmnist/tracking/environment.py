"""What a run ran on: a figure without its machine and versions cannot be compared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
import torch

import vitmnist
from vitmnist.tracking.hardware import gpu_handle

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy", "tensorboard")
CPU_FLAGS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "neon", "sve")
"""How the names of the instruction sets begin that decide how fast matrix products are, on x86 and ARM."""
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_"),
)
"""How the names of the environment variables begin that change times or results."""
SET_BY_TORCH = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")  # when it is imported
SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, driver, settings, and the commit of this program; null where there is no such thing."""
    root = Path(vitmnist.__file__).parent.parent
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vitmnist": vitmnist.__version__,
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "blas": _blas(),
        "env": _variables(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_driver": _driver(device),
        **commit_of(root),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpuinfo(*keys: str) -> str | None:
    """The first value of one of these keys; None on systems without /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def _cpu_flags() -> list[str] | None:
    flags = _cpuinfo("flags", "Features")
    return None if flags is None else sorted(flag for flag in flags.split() if flag.startswith(CPU_FLAGS))


def _blas() -> str | None:
    """The libraries of torch's matrix products on the CPU, as torch was built: `mkl 2024.2, mkl-dnn 3.13.3`."""
    built = torch.__config__.show()
    library = re.search(r"Math Kernel Library Version ([\d.]+)", built)
    named = re.search(r"BLAS_INFO=(\w+)", built)
    dnn = re.search(r"MKL-DNN v([\d.]+)", built)
    blas = f"mkl {library[1]}" if library else named and named[1]
    return ", ".join(filter(None, (blas, dnn and f"mkl-dnn {dnn[1]}"))) or None


def _variables() -> dict[str, str]:
    """The environment variables that change times or results, of those that are set."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and name not in SET_BY_TORCH and not SECRET.search(name)
    }


def _driver(device: torch.device) -> str | None:
    return str(pynvml.nvmlSystemGetDriverVersion()) if gpu_handle(device) is not None else None


def commit_of(root: Path) -> dict[str, Any]:
    """The commit of a source tree, whether it was dirty, and a checksum of what was not committed.

    Nulls where the program was installed without its source tree, or without git; no checksum of a clean tree.
    """

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout

    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = git("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        names = [name for name in git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0") if name]
    except (OSError, subprocess.SubprocessError):
        top = b""
    if Path(os.fsdecode(top)) != root.resolve():  # installed into a folder of another repository, perhaps
        return {"git_commit": None, "git_dirty": None, "git_diff_sha256": None}
    checksum = _checksum(root, changes, names) if changes or names else None
    return {"git_commit": commit.decode(), "git_dirty": checksum is not None, "git_diff_sha256": checksum}


def _checksum(root: Path, changes: bytes, names: list[bytes]) -> str:
    """SHA-256 over a diff, and over the names and contents of files."""
    total = hashlib.sha256(hashlib.sha256(changes).digest())
    for name in sorted(names):
        content = hashlib.sha256()
        with contextlib.suppress(OSError), (root / os.fsdecode(name)).open("rb") as file:  # may be gone, or a dead link
            while block := file.read(2**20):
                content.update(block)
        total.update(hashlib.sha256(name).digest() + content.digest())
    return total.hexdigest()
