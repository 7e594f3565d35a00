"""Compiles preprocessing, model and loss of a training step, forward and backward, with `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor

from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import UnsupportedStepError, first_line
from vitmnist.training.step import Inputs, TrainStep


def compile_step(step: TrainStep, inputs: Inputs, keys: Tensor | None) -> None:
    """Compile a step for batches like this one. Drops its gradients and restores the random generators.

    Raises:
        UnsupportedStepError: the model cannot be compiled; the step stays as it was.
    """
    with preserved_generators(step.device):
        # Eagerly first: a library that fills a cache at its first call, as einops does, would cause a recompilation.
        _run(step, inputs, keys)
        if step.forward is step.eager:
            step.forward = torch.compile(step.eager, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            step.pad = True
        try:
            _run_compiled(step, inputs, keys)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # dynamo and inductor raise many types
            step.forward, step.pad = step.eager, False
            raise UnsupportedStepError(first_line(error)) from error
        finally:
            step.model.zero_grad()


def _run_compiled(step: TrainStep, inputs: Inputs, keys: Tensor | None) -> None:
    """Compile by running; reuses what earlier jobs of a sweep have compiled."""
    try:
        _run(step, inputs, keys)
    except Exception:
        torch.compiler.reset()  # torch compiles at most eight versions; earlier jobs of a sweep may have used them up
        _run(step, inputs, keys)


def _run(step: TrainStep, inputs: Inputs, keys: Tensor | None) -> None:
    images, labels = inputs
    step.forward_backward(images, labels, keys, len(labels))
