"""What `trainer.*` comes down to on the run's device: `auto` becomes a value, with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError
from vitmnist.runtime.timer import synchronize
from vitmnist.training.step import Gradient

SMALLEST_PIECE = 100  # images; below it the calls cost more than the cache saves
TIMED_IMAGES = 1000  # at least, for each size of a piece
TIE = 0.05  # differences below this share of the time are noise
BF16_PAYS = 0.05  # the share of the time that it must save, for what it rounds off
COMPILE_PAYS_S = {"cpu": 300.0, "cuda": 60.0}
"""How long the rest of a run must be expected to take without compiling, which itself takes up to a minute."""

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Images, labels, and the keys of the augmentation or None."""


@dataclass(frozen=True)
class StepConfig:
    """The options of `trainer`, decided; `reasons` tells, by key, of those that were decided here."""

    micro_batch: int | None = None
    compile: bool = False
    precision: Precision = Precision.fp32
    fused: bool = False
    cuda_graph: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def because(self, key: str, value: Any, reason: str) -> StepConfig:
        """The same with another value of an option, and why."""
        return replace(self, **{key: value}, reasons={**self.reasons, key: reason})

    def check(self, device: torch.device, ranks: int = 1) -> None:
        """Raise `ConfigError` if the device has not what it takes, or several processes cannot."""
        if self.cuda_graph and ranks > 1:
            raise ConfigError("trainer.cuda_graph=true: is for one process alone; type trainer.cuda_graph=false")
        if self.cuda_graph and device.type != "cuda":
            raise ConfigError(
                f"trainer.cuda_graph=true: needs a CUDA device, and the run's is {device}; type trainer.cuda_graph=auto"
            )
        if self.precision == Precision.tf32 and device.type != "cuda":
            raise ConfigError(
                f"trainer.precision=tf32: is CUDA's, and the run's device is {device}; "
                "type trainer.precision=fp32 or trainer.precision=auto"
            )
        if self.precision == Precision.bf16 and device.type == "cuda" and not _has_bf16(device):
            raise ConfigError(f"trainer.precision=bf16: {device} has no bfloat16; type trainer.precision=auto")

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "precision": self.precision.value}

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> StepConfig:
        """What `record` gave; raises `TypeError` or `ValueError` if it is something else."""
        return cls(**{**record, "precision": Precision(record["precision"])})

    def lines(self) -> str:
        """For people: what was decided here, and why."""
        return "\n".join(f"trainer.{key}={_shown(getattr(self, key))}: {why}" for key, why in self.reasons.items())


Seconds = Callable[[int, Precision], float]
"""What an image takes forward and backward, in seconds, by how many are taken at once, and how precisely."""


def decide(
    config: TrainerConfig, device: torch.device, batch_size: int, images: int, seconds: Seconds, ranks: int = 1
) -> StepConfig:
    """Give each option that is `auto` the value that pays on the device.

    Args:
        batch_size: images in a batch, of one rank.
        images: how many the run will train on, all epochs together.
        seconds: asked only if something depends on it; raises `torch.OutOfMemoryError` where a piece does not fit.
        ranks: how many processes train together.

    Raises:
        ConfigError: something was asked for by name that the device has not.
    """
    given = {
        "micro_batch": config.micro_batch,
        "compile": config.compile,
        "precision": config.precision,
        "fused": config.fused,
        "cuda_graph": config.cuda_graph,
    }
    trainer = StepConfig(**{key: value for key, value in given.items() if value != "auto"})  # type: ignore[arg-type]
    trainer.check(device, ranks)
    if config.cuda_graph is True and config.fused is False:
        raise ConfigError("trainer.cuda_graph=true needs trainer.fused=true, which takes a learning rate that changes")
    cuda = device.type == "cuda"
    if config.fused == "auto":
        trainer = trainer.because("fused", True, "one call changes all weights")
    if config.cuda_graph == "auto":
        trainer = trainer.because("cuda_graph", *_cuda_graph_pays(device, ranks, trainer.fused))
    if config.precision == Precision.auto and cuda:
        # Without compiling a small model's step is all launches, and a measurement would tell nothing.
        precision, reason = Precision.fp32, f"{device} has no bfloat16"
        if _has_bf16(device):
            precision, reason = Precision.bf16, f"{device} has tensor cores for it"
        trainer = trainer.because("precision", precision, reason)

    taken: float | None = None
    if config.micro_batch == "auto":
        timed = time_pieces(batch_size, lambda size: seconds(size, trainer.precision))
        # Of what is equally fast the smallest: it leaves memory, and in the cache room for what else is there.
        piece = min(size for size, figure in timed.items() if figure <= min(timed.values()) * (1 + TIE))
        taken = timed[piece]
        figures = ", ".join(f"{size}: {_microseconds(figure)}" for size, figure in sorted(timed.items()))
        trainer = trainer.because("micro_batch", piece, f"microseconds an image by images at once: {figures}")
    piece = trainer.micro_batch or batch_size
    if config.precision == Precision.auto and not cuda:
        whole = taken or seconds(piece, Precision.fp32)
        half = seconds(piece, Precision.bf16)
        precision, taken = (Precision.bf16, half) if half < whole * (1 - BF16_PAYS) else (Precision.fp32, whole)
        reason = f"microseconds an image with fp32: {_microseconds(whole)}, with bf16: {_microseconds(half)}"
        trainer = trainer.because("precision", precision, reason)
    if config.compile == "auto":
        try:
            expected, pays = (taken or seconds(piece, trainer.precision)) * images, COMPILE_PAYS_S[device.type]
        except torch.OutOfMemoryError:
            return trainer.because("compile", False, "there is no memory to time the step without")
        reason = f"the run is expected to train for {expected:.0f} s without; from {pays:.0f} s on it pays"
        trainer = trainer.because("compile", expected >= pays, reason)
    return trainer


def _cuda_graph_pays(device: torch.device, ranks: int, fused: bool) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, f"it is CUDA's, and the run's device is {device}"
    if ranks > 1:
        return False, "the processes add their gradients up amid the step"
    return (True, "one launch a step") if fused else (False, "it needs trainer.fused=true")


def _has_bf16(device: torch.device) -> bool:
    """Whether a CUDA device multiplies bfloat16 by itself, which those since Ampere do."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def time_pieces(batch_size: int, seconds: Callable[[int], float]) -> dict[int, float]:
    """What an image takes, by the size of a piece, from small ones up until they are clearly slower or do not fit."""
    sizes = [batch_size]
    while (half := -(-sizes[-1] // 2)) >= SMALLEST_PIECE:
        sizes.append(half)
    timed: dict[int, float] = {}
    for size in reversed(sizes):
        try:
            timed[size] = seconds(size)
        except torch.OutOfMemoryError:
            if not timed:
                raise
            break
        if timed[size] > 1.2 * min(timed.values()):
            break
    return timed


def timer(model: nn.Module, preprocess: Preprocess, batch: Callable[[], Batch]) -> Seconds:
    """Measures on a batch, as far as it reaches."""

    def seconds(size: int, precision: Precision) -> float:
        images, labels, keys = batch()
        count = min(len(labels), size * -(-TIMED_IMAGES // size))  # whole pieces
        gradient = Gradient(model, preprocess, count, size, precision)
        taken = []
        try:
            for _ in range(4):  # the first warms up
                started = time.perf_counter()
                gradient.accumulate(images[:count], labels[:count], None if keys is None else keys[:count], count)
                synchronize(gradient.device)
                taken.append(time.perf_counter() - started)
        finally:
            model.zero_grad()
        return median(taken[1:]) / count

    return seconds


def _shown(value: object) -> str:
    return str(value.value if isinstance(value, Precision) else value).lower().replace("none", "null")
