"""A whole training step as one graph of the device's, recorded once and replayed: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitmnist.data.loaders import Loader
from vitmnist.data.tensors import TensorSet
from vitmnist.optim.ema import EMA
from vitmnist.runtime.device import Accelerator
from vitmnist.training.step import IGNORED, Gradient

WARM_UP = 3  # steps before the recording, in which libraries set themselves up


class CapturedStep:
    """Gather, preprocessing, forward, backward, optimizer and average, replayed on the tensors of the recording.

    What differs from step to step is written into those first: the batch, how many of its images count, the learning
    rates, and what the average takes in. The rates are tensors within the recording only; the optimizer keeps its
    numbers, with which schedules compute.

    Args:
        batch: images and labels as the loader delivers them, a whole batch.
        keys: what the batch's augmentation is drawn from, or None.
        resident: the set, if it is on the device; then a batch is the indices of its images.
    """

    def __init__(
        self,
        gradient: Gradient,
        optimizer: Optimizer,
        average: EMA | None,
        batch: tuple[Tensor, Tensor],
        keys: Tensor | None,
        resident: TensorSet | None,
        accelerator: Accelerator,
    ) -> None:
        self._gradient, self._optimizer, self._average, self._resident = gradient, optimizer, average, resident
        device = gradient.device
        size = len(batch[1])
        self._batch = (torch.arange(size, device=device),) if resident else tuple(part.clone() for part in batch)
        self._keys = None if keys is None else keys.clone()
        self._positions = torch.arange(size, device=device)
        self._size = torch.tensor(float(size), device=device)
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        self._weight = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        with self._rates_as_tensors(), _unchanged(gradient, optimizer, average):
            self._replay = accelerator.capture(self._work, WARM_UP)

    def batches(self, loader: Loader, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        """What a call takes of each batch of an epoch from batch `start` on."""
        if not self._resident:
            return loader.epoch(epoch, start)
        indices = loader.sampler.indices(epoch, start, self._positions.device)
        return ((part,) for part in indices.split(loader.sampler.batch_size) if len(part))

    def __call__(self, batch: tuple[Tensor, ...], keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take a step; the batch's mean loss and right answers, which the next step overwrites.

        Args:
            batch: as `batches` gives it; a short one leaves the rest of the recorded batch uncounted.
        """
        size = len(batch[-1])
        for static, part in zip(self._batch, batch, strict=True):
            static[:size].copy_(part)
        if self._keys is not None and keys is not None:
            self._keys[:size].copy_(keys)
        self._size.fill_(size)
        for tensor, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            tensor.fill_(group["lr"])
        if self._average:
            self._weight.fill_(self._average.next_weight())
        self._replay()
        return self._loss, self._right

    def _work(self) -> None:
        if self._resident:
            (indices,) = self._batch
            images = self._resident.images.index_select(0, indices)
            labels = self._resident.labels.index_select(0, indices)
        else:
            images, labels = self._batch
        labels = labels.where(self._positions < self._size, IGNORED)
        loss, right = self._gradient.accumulate(images, labels, self._keys, self._size)
        self._optimizer.step()
        if self._average:
            self._average.take_in(self._weight)
        self._loss.copy_(loss)
        self._right.copy_(right)

    @contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        numbers = [group["lr"] for group in self._optimizer.param_groups]
        try:
            for group, tensor in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = tensor
                if "capturable" in group:  # Adam's count of its steps, on the device too
                    group["capturable"] = tensor.device.type == "cuda"
            yield
        finally:
            for group, number in zip(self._optimizer.param_groups, numbers, strict=True):
                group["lr"] = number


@contextmanager
def _unchanged(gradient: Gradient, optimizer: Optimizer, average: EMA | None) -> Iterator[None]:
    """Whatever happens to weights and state within, their tensors, which a graph refers to, end as they were.

    What an optimizer has made within becomes zero: for those of this program, the state before the first step.
    """
    models = [gradient.model, *([average.model] if average else [])]
    tensors = [value for model in models for value in (*model.parameters(), *model.buffers())]
    before = [(value, value.detach().clone()) for value in (*tensors, *_state(optimizer))]
    known = {id(value) for value, _ in before}
    try:
        yield
    finally:
        with torch.no_grad():
            for value, kept in before:
                value.copy_(kept)
            for value in _state(optimizer):
                if id(value) not in known:
                    value.zero_()


def _state(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
