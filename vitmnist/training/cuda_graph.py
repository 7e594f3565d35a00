"""A whole training step as one CUDA graph: captured once, then replayed with one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import UnsupportedStepError, first_line
from vitmnist.loaders.base import Loader
from vitmnist.runtime.backend import Backend
from vitmnist.training.step import IGNORED, Inputs, Sums, TrainStep

WARM_UP = 3  # steps before the capture, in which libraries allocate their workspaces


def capture_step(step: TrainStep, loader: Loader, backend: Backend) -> None:
    """Let `step` replay a graph from now on; weights, optimizer and random generators stay as they are.

    A graph does not see an optimizer state that is loaded later, so restore a run first.

    Args:
        loader: delivers the batches that the step will be called with.

    Raises:
        UnsupportedStepError: the model does something that cannot be captured; the step stays as it was.
    """
    pad = step.pad
    step.model.train()
    step.pad = True
    try:
        with preserved_generators(step.device):
            step.replay = GraphedStep(step, loader, backend).replay
    except RuntimeError as error:  # includes out of memory: a graph has a memory pool of its own
        step.pad = pad
        raise UnsupportedStepError(first_line(error)) from error


class GraphedStep:
    """Preprocessing, forward, backward, optimizer and EMA, replayed on the tensors of the capture.

    What changes from step to step is written into those tensors first: the batch, its size, the learning rates, and the
    weight of the EMA. The learning rates are tensors during the capture only; the optimizer keeps its floats, which the
    schedule reads.

    Args:
        step: must not be distributed.
        loader: delivers batches of the shape to capture.
    """

    def __init__(self, step: TrainStep, loader: Loader, backend: Backend) -> None:
        self._step, device = step, step.device
        with closing(loader.epoch(0)) as batches:
            images, labels = next(batches)
        keys = next(step.preprocess.keys(loader.sampler, 0))
        self._positions = torch.arange(len(labels), device=device)
        self._inputs: Inputs = images.clone(), labels.clone()
        self._keys = None if keys is None else keys.clone()
        self._size = torch.tensor(float(len(labels)), device=device)
        self._lrs = [torch.tensor(float(group["lr"]), device=device) for group in step.optimizer.param_groups]
        self._ema_weight = torch.zeros((), device=device)
        self._sums: Sums = {}
        with self._lrs_as_tensors(), _restored_tensors(step):
            self._replay = backend.capture(self._work, WARM_UP)

    def replay(self, inputs: Inputs, keys: Tensor | None) -> Sums:
        """Take a step; the next one overwrites its sums.

        Args:
            inputs: a short batch leaves the rest of the captured batch without loss.
        """
        size = len(inputs[0])
        for static, part in zip(self._inputs, inputs, strict=True):
            static[:size].copy_(part)
        if self._keys is not None and keys is not None:
            self._keys[:size].copy_(keys)
        self._size.fill_(size)
        for lr, group in zip(self._lrs, self._step.optimizer.param_groups, strict=True):
            lr.fill_(group["lr"])
        if self._step.ema:
            self._ema_weight.fill_(self._step.ema.next_weight())
        self._replay()
        return self._sums

    def _work(self) -> None:
        images, labels = self._inputs
        labels = labels.where(self._positions < self._size, IGNORED)
        # The capture is the last call to assign these tensors; each replay writes into them.
        self._sums = self._step.forward_backward(images, labels, self._keys, self._size)
        self._step.optimizer.step()
        if self._step.ema:
            self._step.ema.update(self._ema_weight)

    @contextmanager
    def _lrs_as_tensors(self) -> Iterator[None]:
        groups = self._step.optimizer.param_groups
        floats = [group["lr"] for group in groups]
        try:
            for group, lr in zip(groups, self._lrs, strict=True):
                group["lr"] = lr
                if "capturable" in group:  # Adam then counts its steps on the device
                    group["capturable"] = lr.device.type == "cuda"
            yield
        finally:
            for group, value in zip(groups, floats, strict=True):
                group["lr"] = value


@contextmanager
def _restored_tensors(step: TrainStep) -> Iterator[None]:
    """Restore the values of weights and optimizer state on exit, in the same tensors, to which the graph refers.

    State that the optimizer creates within becomes zero, which is its value before the first step.
    """
    models = nn.ModuleList([step.model, step.eval_model])
    tensors = [*models.parameters(), *models.buffers(), *_state_tensors(step.optimizer)]
    before = {tensor: tensor.detach().clone() for tensor in tensors}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in (*tensors, *_state_tensors(step.optimizer)):
                tensor.copy_(before.get(tensor, torch.zeros_like(tensor)))


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
