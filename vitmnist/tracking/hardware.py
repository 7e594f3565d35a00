"""How much memory a run took and how busy it kept the GPU; None where this machine cannot tell."""

from __future__ import annotations

import contextlib
from typing import Any

import pynvml
import torch

from vitmnist.runtime.memory import host_memory, reset_host_peak

MIB = 2**20


def gpu_handle(device: torch.device) -> Any | None:
    """The driver's (NVML's) handle of a CUDA device; None where there is none."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        # By UUID, because CUDA_VISIBLE_DEVICES renumbers devices for torch but not for the driver.
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


class HardwareFigures:
    """Peak memory since its making, and GPU use since a given time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = gpu_handle(device)
        # A peak outlives the job that made it, and a sweep runs its jobs in one process.
        self._host_reset = reset_host_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def host_peak_mib(self) -> float | None:
        """Peak resident memory of this process, in MiB; not of its workers. Linux only."""
        return host_memory("VmHWM") / MIB if self._host_reset else None

    def gpu_peak_mib(self) -> float | None:
        """Peak memory of torch's tensors on the device, in MiB."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) / MIB

    def gpu_util_pct(self, since: float) -> float | None:
        """Mean share of time in which a kernel ran, in percent, over the driver's samples.

        Args:
            since: seconds since 1970, as `time.time()` gives them.
        """
        if self._gpu is None:
            return None
        with contextlib.suppress(pynvml.NVMLError):
            _, samples = pynvml.nvmlDeviceGetSamples(
                self._gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, int(since * 1_000_000)
            )
            if samples:
                return float(sum(sample.sampleValue.uiVal for sample in samples) / len(samples))
        return None
