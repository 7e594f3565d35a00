"""Compiles preprocessing, model and loss of a training step, forward and backward, with `torch.compile`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import ConfigError, first_line
from vitmnist.loaders.base import Loader
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepConfig

log = logging.getLogger(__name__)


def compile_step(step: TrainStep, loader: Loader, config: StepConfig) -> StepConfig:
    """Compile a step if configured, for what the loader delivers: uint8 or float32.

    Drops the step's gradients, and restores the model's buffers and the random generators.

    Returns:
        The options: with `compile=False` if it was `auto` and failed. The step is then eager.

    Raises:
        ConfigError: `trainer.compile=true` failed.
    """
    if not config.compile:
        return config
    if not step.compile_s:
        log.info("compiling the step, which may take a minute")
    keys = next(step.preprocess.keys(loader.sampler, 0))
    with closing(loader.epoch(0)) as batches:
        images, labels = next(batches)
    batch = images, labels, keys, len(labels)
    started = time.perf_counter()
    with preserved_generators(step.device), preserved_buffers(step.model):
        if step.forward is step.eager:
            # Eagerly first: a library that fills a cache at its first call, as einops does, would recompile later.
            step.forward_backward(*batch)
            step.forward = torch.compile(step.eager, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            step.mixed = torch.compile(step.mixed, fullgraph=True, dynamic=False)
            step.pad = True
        try:
            _run_compiled(step, *batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # dynamo and inductor raise many types
            step.forward, step.mixed, step.pad = step.eager, step.preprocess.mixed, False
            reason = f"failed: {first_line(error)}"
            if "compile" not in config.reasons:
                raise ConfigError(f"trainer.compile=true: {reason}; type trainer.compile=false") from error
            log.info("trainer.compile=false: %s", reason)
            return replace(config, compile=False, reasons={**config.reasons, "compile": reason})
        finally:
            step.model.zero_grad()
    step.compile_s += time.perf_counter() - started
    return config


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model on exit, such as the statistics of batch normalisation."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)


def _run_compiled(step: TrainStep, images: Tensor, labels: Tensor, keys: Tensor | None, size: int) -> None:
    """Compile by running; reuses what earlier jobs of a sweep have compiled."""
    try:
        step.forward_backward(images, labels, keys, size)
    except Exception:
        torch.compiler.reset()  # torch compiles at most eight versions; earlier jobs of a sweep may have used them up
        step.forward_backward(images, labels, keys, size)
