"""The options of `trainer`, with `auto` resolved by static rules for the run's device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.runtime.cpu import BF16_UNITS, has_bf16_units

CPU_MICRO_BATCH = 2048
"""The most images of a microbatch on a CPU. With 32 MiB of cache, the articles' transformer (bf16, batch 500 and 5000,
sizes from 125 to the whole batch) was fastest with 1,000 to 2,500 images, compiled or not."""
COMPILE_FROM_IMAGES = {Precision.bf16: 400_000, Precision.fp32: 4_000_000}
"""Training images, over all epochs, from which compiling pays on two cores of a CPU. Without a cache it takes 40 s. It
saves 0.1 ms an image in bf16 (batch 500: 147 ms a step without, 95 ms with), and 0.01 ms in float32 (115 and 111 ms).
The same thresholds apply to a GPU, where nobody has measured them: a short run would mostly compile there too."""


@dataclass(frozen=True)
class StepConfig:
    """How a training step is computed. All of these options change the result only by rounding.

    Exception: batch normalisation takes its statistics from a microbatch.

    Args:
        precision: fp32 or bf16.
        reasons: why the value is what it is, by key, for each value that the configuration left to `auto`.
    """

    micro_batch: int | None = None
    compile: bool = False
    precision: str = Precision.fp32.value
    fused: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """A line for each value that was `auto`."""
        values = asdict(self)
        return "\n".join(
            f"trainer.{key}={values[key] if isinstance(values[key], str) else json.dumps(values[key])}: {reason}"
            for key, reason in self.reasons.items()
        )


def resolve_step_config(config: TrainerConfig, device: torch.device, batch_size: int, images: int) -> StepConfig:
    """Replace each `auto` by a value that suits the device.

    Args:
        batch_size: images per batch of one rank.
        images: training images of the whole run, over all epochs.
    """
    is_cuda, has_bf16 = device.type == "cuda", _has_bf16(device)
    units = "the GPU {} compute capability 8.0 or higher" if is_cuda else f"the processor {{}} {BF16_UNITS}"
    precision = Precision.bf16 if has_bf16 else Precision.fp32
    compile_from = COMPILE_FROM_IMAGES[precision if config.precision == Precision.auto else config.precision]
    choices: dict[str, tuple[Any, str]] = {
        "fused": (True, "one kernel updates all weights"),
        "precision": (precision.value, units.format("has" if has_bf16 else "lacks")),
        "micro_batch": (min(batch_size, CPU_MICRO_BATCH), f"at most {CPU_MICRO_BATCH:,} images stay in the cache"),
        "compile": (
            images >= compile_from,
            f"the run trains on {images:,} images, and compiling pays from {compile_from:,} on",
        ),
    }
    if is_cuda:
        choices["micro_batch"] = (None, "the GPU computes the whole batch at once")
    values = {**vars(config), "precision": config.precision.value}
    auto = {key: choice for key, choice in choices.items() if values[key] == "auto"}
    resolved = {key: auto[key][0] if key in auto else values[key] for key in choices}
    return StepConfig(**resolved, reasons={key: reason for key, (_, reason) in auto.items()})


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; torch emulates it on older ones
    return has_bf16_units()
