"""Peak memory, and use of the GPU and the processor, of a run; None for what this machine cannot measure."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pynvml
import torch

from vitmnist.runtime.cpu import Cores, CpuTime, available_cores
from vitmnist.runtime.memory import host_memory, reset_host_peak

MIB = 2**20


def gpu_handle(device: torch.device) -> Any | None:
    """The driver's (NVML's) handle of a CUDA device; None for other devices."""
    if device.type == "cuda":
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            # By UUID, because CUDA_VISIBLE_DEVICES renumbers devices for torch but not for the driver.
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


class HardwareFigures:
    """Peak memory, and use of the GPU and the processor, since construction; `cores` up to the last `metrics()`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, gpu_handle(device)
        self._read_until = int(time.time() * 1_000_000)  # microseconds, the driver's unit
        self._busy = self._samples = 0
        self._cpu_time, self.cores = CpuTime.now(), Cores(available_cores(), busy=0.0)
        # A sweep runs its jobs in one process: a peak must not include the jobs before.
        self._host_reset = reset_host_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float | None]:
        """The metrics of an epoch that are not about time; docs/records.md describes them."""
        self.cores, is_cuda = CpuTime.now().cores_since(self._cpu_time), self._device.type == "cuda"
        return {
            "host_peak_mib": host_memory("VmHWM") / MIB if self._host_reset else None,
            "gpu_peak_mib": torch.cuda.max_memory_allocated(self._device) / MIB if is_cuda else None,
            "cores_busy": self.cores.busy + self.cores.others,
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
