"""The options of `trainer`, with `auto` resolved by static rules for the run's device."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.errors import ConfigError
from vitmnist.runtime.cpu import BF16_UNITS, has_bf16_units

CPU_MICRO_BATCH = 2048
"""The largest microbatch on a CPU. With 32 MiB of cache, the articles' transformer (bf16, batch sizes 500 and 5000) is
fastest with microbatches of 1,000 to 2,500 images, compiled or not."""
COMPILE_FROM_IMAGES = {Precision.bf16: 400_000, Precision.fp32: 4_000_000}
"""The number of training images, over all epochs, from which compiling pays on two CPU cores. Compiling takes 40 s
without a cache. It saves 0.1 ms per image in bf16 (95 ms instead of 147 per step of 500 images) and 0.01 ms in float32
(111 ms instead of 115)."""
SLOW_EAGER_BF16 = "bf16 pays only in a graph or in compiled code"
"""The reason for float32 in an eager step on a GPU: the host launches a cast of every weight in every step. On an H100,
an epoch at batch size 500 takes 2.83 s in float32 and 3.78 s in bf16."""
AutoChoices = dict[str, tuple[Any, str]]
"""Maps a key of `trainer` to the value that replaces `auto`, and the reason."""


@dataclass(frozen=True)
class StepOptions:
    """How a training step is computed; see `conf/trainer/fast.yaml`.

    The options change the result only by rounding, except with batch normalisation: its statistics depend on the size
    of a microbatch.
    """

    micro_batch: int | None = None
    compile: bool = False
    precision: str = Precision.fp32.value
    fused: bool = False
    graph: bool = False
    reasons: dict[str, str] = field(default_factory=dict)  # The reason for each value that replaced `auto`, by key

    def fall_back(self, reason: str) -> "StepOptions":
        """Return the options of an eager step; `reason` is the error of compiling or of capturing a graph.

        Raises:
            ConfigError: the configuration requires compiled code or a graph.
        """
        key = "compile" if self.compile else "graph"
        if key not in self.reasons:  # The value is not from `auto`.
            raise ConfigError(f"trainer.{key}=true: failed: {reason}; set trainer.{key}=false")
        precision, reasons = self.precision, {**self.reasons, key: f"failed: {reason}"}
        if self.graph and precision == Precision.bf16 and "precision" in self.reasons:
            precision, reasons["precision"] = Precision.fp32.value, SLOW_EAGER_BF16
        return replace(self, compile=False, graph=False, precision=precision, reasons=reasons)

    def describe(self) -> str:
        """Return a line for each value that replaced `auto`."""
        values = {key: json.dumps(getattr(self, key)).strip('"') for key in self.reasons}
        return "\n".join(f"trainer.{key}={values[key]}: {reason}" for key, reason in self.reasons.items())


def resolve_step_options(
    config: TrainerConfig, device: torch.device, batch_size: int, num_images: int, ranks: int = 1
) -> StepOptions:
    """Replace each `auto` by a value that suits the device.

    Args:
        batch_size: images per batch of one rank.
        num_images: training images of the whole run, over all epochs.

    Raises:
        ConfigError: `trainer.graph=true` where no graph is possible, or a precision that the device lacks.
    """
    _check_precision(config, device)
    obstacle = _find_graph_obstacle(config, device, batch_size, ranks)
    choices: AutoChoices = {
        "fused": (True, "one kernel updates all weights"),
        "graph": (not obstacle, obstacle or "the GPU does not wait for Python"),
    }
    if device.type == "cuda":
        choices |= _choose_for_cuda(config, device, has_graph=not obstacle and config.graph is not False)
    else:
        choices |= _choose_for_cpu(config, device, batch_size, num_images)
    values = {key: getattr(config, key) for key in choices} | {"precision": config.precision.value}
    reasons = {}
    for key, (value, reason) in choices.items():
        if values[key] == "auto":
            values[key], reasons[key] = value, reason
    return StepOptions(**values, reasons=reasons)


def _check_precision(config: TrainerConfig, device: torch.device) -> None:
    precision, advice = config.precision, "set trainer.precision=fp32 or auto"
    if precision in (Precision.tf32, Precision.fp16) and device.type != "cuda":
        raise ConfigError(f"trainer.precision={precision.value}: is for CUDA devices, not for {device}; {advice}")
    if precision == Precision.tf32 and not _has_bf16(device):
        raise ConfigError(f"trainer.precision=tf32: needs compute capability 8.0, which {device} lacks; {advice}")
    if precision == Precision.fp16 and not config.fused:
        # An optimizer that is not fused waits for the GPU in each step, to check whether a gradient overflowed.
        raise ConfigError("trainer.precision=fp16: needs a fused optimizer; set trainer.fused=true")


def _find_graph_obstacle(config: TrainerConfig, device: torch.device, batch_size: int, ranks: int) -> str | None:
    """Return why the step cannot be a graph, or None. Raises `ConfigError` if `trainer.graph=true` requires a graph."""
    obstacle = None
    if device.type != "cuda":
        obstacle = "only CUDA devices have graphs"
    elif ranks > 1:
        obstacle = f"this run has {ranks} ranks, and graphs support only one"
    elif config.compile is True:
        obstacle = "trainer.compile=true"
    elif isinstance(config.micro_batch, int) and config.micro_batch < batch_size:
        obstacle = f"a graph takes the whole batch, and trainer.micro_batch={config.micro_batch} takes a part of it"
    if obstacle and config.graph is True:
        raise ConfigError(f"trainer.graph=true is not possible: {obstacle}; set trainer.graph=false")
    return obstacle


def _choose_for_cpu(config: TrainerConfig, device: torch.device, batch_size: int, num_images: int) -> AutoChoices:
    has_bf16 = _has_bf16(device)
    precision = Precision.bf16 if has_bf16 else Precision.fp32
    compile_from = COMPILE_FROM_IMAGES[precision if config.precision == Precision.auto else config.precision]
    return {
        "precision": (precision.value, f"the processor {'has' if has_bf16 else 'lacks'} {BF16_UNITS}"),
        "micro_batch": (min(batch_size, CPU_MICRO_BATCH), f"above {CPU_MICRO_BATCH:,} images, MNIST trains slower"),
        "compile": (
            num_images >= compile_from,
            f"the run trains on {num_images:,} images, and compiling pays from {compile_from:,} on",
        ),
    }


def _choose_for_cuda(config: TrainerConfig, device: torch.device, has_graph: bool) -> AutoChoices:
    precision, reason = Precision.fp32, "the GPU lacks compute capability 8.0 or higher"
    if _has_bf16(device):
        reason = SLOW_EAGER_BF16
        if has_graph or config.compile is True:
            precision, reason = Precision.bf16, "the GPU has compute capability 8.0 or higher"
    return {
        "precision": (precision.value, reason),
        "micro_batch": (None, "the GPU computes the whole batch at once"),
        "compile": (False, "a graph saves more; without a graph, compiling did not pay where it was measured"),
    }


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Torch emulates bf16 before Ampere.
    return has_bf16_units()
