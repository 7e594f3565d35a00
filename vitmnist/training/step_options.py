"""The options of `trainer`, with `auto` resolved by static rules for the run's device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.runtime.cpu import BF16_UNITS, has_bf16_units, last_level_cache

CACHE_PER_IMAGE = 16 * 1024
"""Bytes of last-level cache per image of a microbatch: 2,048 images with 32 MiB. There the articles' transformer (bf16,
batch 500 and 5000, sizes from 125 to the whole batch) was fastest with 1,000 to 2,500 images, compiled or not."""
DEFAULT_CACHE = 32 * 2**20
COMPILE_FROM_IMAGES = {Precision.bf16: 400_000, Precision.fp32: 4_000_000}
"""Training images, over all epochs, from which compiling pays on two cores of a CPU. Without a cache it takes 40 s. It
saves 0.1 ms an image in bf16 (batch 500: 147 ms a step without, 95 ms with), and 0.01 ms in float32 (115 and 111 ms).
It holds on a GPU too until one has measured its own: there as well a short run would mostly compile."""


@dataclass(frozen=True)
class StepConfig:
    """How a training step is computed. Changes the result by rounding only.

    Exception: batch normalisation takes its statistics from a microbatch.

    `reasons` explains, by key, each value that the configuration left to `auto`.
    """

    micro_batch: int | None = None
    compile: bool = False
    precision: Precision = Precision.fp32
    fused: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "precision": self.precision.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepConfig:
        """From `to_dict()`."""
        return cls(**{**values, "precision": Precision(values["precision"])})

    def describe(self) -> str:
        """A line for each value that was `auto`."""
        values = self.to_dict()
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
    is_cuda, bf16 = device.type == "cuda", _has_bf16(device)
    units = ("the GPU", "compute capability 8.0 or higher") if is_cuda else ("the processor", BF16_UNITS)
    precision = Precision.bf16 if bf16 else Precision.fp32
    compile_from = COMPILE_FROM_IMAGES[precision if config.precision == Precision.auto else config.precision]
    cache = last_level_cache() or DEFAULT_CACHE
    rules: dict[str, tuple[Any, str]] = {
        "fused": (True, "one kernel updates all weights"),
        "precision": (precision, f"{units[0]} {'has' if bf16 else 'lacks'} {units[1]}"),
        "micro_batch": (None, "the GPU computes the whole batch at once")
        if is_cuda
        else (min(batch_size, max(cache // CACHE_PER_IMAGE, 1)), f"{cache >> 20} MiB of cache, 16 KiB per image"),
        "compile": (
            images >= compile_from,
            f"the run trains on {images:,} images, and compiling pays from {compile_from:,} on"
            + (" (as a CPU measured it)" if is_cuda else ""),
        ),
    }
    configured = {key: getattr(config, key) for key in rules}
    resolved = {key: rules[key][0] if value == "auto" else value for key, value in configured.items()}
    return StepConfig(**resolved, reasons={key: rules[key][1] for key, value in configured.items() if value == "auto"})


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; torch emulates it on older ones
    return has_bf16_units()
