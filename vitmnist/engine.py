"""The only loop there is: one epoch of training, and one pass of evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.clock import Clock, synchronize
from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import TrainingError


@dataclass(frozen=True)
class PassFigures:
    """One pass over a split. Times in seconds; `loss` is the mean per image, `accuracy` a percentage.

    `seconds` is the whole pass: `data_wait_s`, `compute_s` and everything else.
    """

    images: int
    loss: float
    accuracy: float
    seconds: float
    data_wait_s: float
    compute_s: float


class Tally:
    """Loss and right answers of a pass, kept on the device and read once at its end."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._losses = torch.zeros(steps, device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._sizes: list[int] = []

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: its mean loss, its logits `[B, classes]` and its labels `[B]`."""
        self._losses[len(self._sizes)] = loss.detach()
        self._right += (logits.detach().argmax(dim=1) == labels).sum()
        self._sizes.append(len(labels))

    def read(self) -> tuple[list[float], list[int], int]:
        """The mean loss of each batch, its size, and the right answers of them all; waits for the device."""
        return self._losses.tolist(), self._sizes, int(self._right)


def train_epoch(
    model: nn.Module,
    loader: Loader,
    epoch: int,
    preprocess: Preprocess,
    optimizer: Optimizer,
    schedule: LRScheduler,
    device: torch.device,
    advance: Callable[[], object],
) -> PassFigures:
    """Train on epoch number `epoch` of the loader, a step a batch; the schedule moves with each step.

    Nothing is read back from the device before the end of the epoch.

    Args:
        advance: called after each step, for a progress bar.

    Raises:
        TrainingError: a loss was not finite; names the first step where it was not.
    """
    model.train()
    tally = Tally(len(loader), device)
    rates: list[float] = []
    synchronize(device)
    started = time.perf_counter()
    clock = Clock(device)
    for (images, labels), keys in zip(loader.epoch(epoch), preprocess.keys(loader.order, epoch), strict=False):
        clock.begin("computing")
        logits = model(preprocess(images, keys))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        tally.add(loss, logits, labels)
        clock.begin("other")
        advance()
        clock.begin("waiting")
    losses, sizes, right = tally.read()
    for step, (value, rate) in enumerate(zip(losses, rates, strict=True), start=1):
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} in epoch {epoch + 1}, step {step}, at learning rate {rate:g}; "
                "try a smaller optimizer.lr"
            )
    return _figures(losses, sizes, right, started, clock)


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    device: torch.device,
    advance: Callable[[], object],
) -> PassFigures:
    """Run the model over the loader's epoch 0 without changing it; arguments as in `train_epoch`."""
    model.eval()
    tally = Tally(len(loader), device)
    synchronize(device)
    started = time.perf_counter()
    clock = Clock(device)
    with torch.inference_mode():
        for images, labels in loader.epoch(0):
            clock.begin("computing")
            logits = model(preprocess(images))
            tally.add(F.cross_entropy(logits, labels), logits, labels)
            clock.begin("other")
            advance()
            clock.begin("waiting")
    losses, sizes, right = tally.read()
    return _figures(losses, sizes, right, started, clock)


def _figures(losses: list[float], sizes: list[int], right: int, started: float, clock: Clock) -> PassFigures:
    images = sum(sizes)
    # A short last batch weighs as many images as it has.
    total = math.fsum(loss * size for loss, size in zip(losses, sizes, strict=True))
    return PassFigures(
        images=images,
        loss=total / images,
        accuracy=100 * right / images,
        seconds=time.perf_counter() - started,  # the tally was read: the device is at rest
        data_wait_s=clock.seconds("waiting"),
        compute_s=clock.seconds("computing"),
    )
