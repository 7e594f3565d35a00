"""The only loop there is: one epoch of training, and one pass of evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.clock import EpochTimer
from vitmnist.data.loaders import Loader
from vitmnist.data.order import EpochOrder
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import TrainingError
from vitmnist.training import Step
from vitmnist.training.gradient import IGNORED
from vitmnist.world import ALONE, World


@dataclass(frozen=True)
class PassFigures:
    """One pass over a split. Times in seconds; `loss` is the mean per image, `accuracy` a percentage.

    Where several processes train together, images, loss and accuracy are those of all, times those of this one.
    `seconds` is the whole pass without `save_s`: `data_wait_s`, `compute_s` and everything else.
    """

    images: int
    loss: float
    accuracy: float
    seconds: float
    data_wait_s: float
    compute_s: float
    save_s: float


@dataclass(frozen=True)
class StepFigures:
    """A training step: its number from the first of the run on, its mean loss, its learning rate, and the norm of all
    gradients together; None where the norm was not finite."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None


@dataclass(frozen=True)
class Predictions:
    """What a model took the images of a split for, in its order, on the device.

    Args:
        labels: int64 `[N]`, the most likely class.
        confidence: float `[N]`, its probability by the model.
    """

    labels: Tensor
    confidence: Tensor

    def confusion_matrix(self, actual: Tensor, classes: int) -> Tensor:
        """How many images of each class (rows) were taken for each class (columns): int64 `[classes, classes]`, CPU.

        Args:
            actual: the true classes, int64 `[N]` on any device.
        """
        pairs = actual.to(self.labels.device) * classes + self.labels
        return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()

    def mistakes(self, actual: Tensor) -> list[int]:
        """The indices of the misclassified images, the most confident first.

        Args:
            actual: the true classes, int64 `[N]` on any device.
        """
        wrong = (self.labels != actual.to(self.labels.device)).nonzero().flatten()
        worst_first = self.confidence[wrong].argsort(descending=True, stable=True)
        indices: list[int] = wrong[worst_first].tolist()
        return indices


class Tally:
    """Loss and right answers of a pass, kept on the device and read once at its end.

    Each rank counts its own images; reading adds them up, so all ranks must read when one does.
    """

    def __init__(self, steps: int, device: torch.device, world: World = ALONE) -> None:
        self._world = world
        self._losses = torch.zeros(steps, device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._sizes: list[int] = []
        self.rates: list[float] = []

    @property
    def steps(self) -> int:
        """Batches counted so far."""
        return len(self._sizes)

    def add(self, loss: Tensor, right: Tensor, size: int, rate: float = 0.0) -> None:
        """Count a batch.

        Args:
            loss: the sum over this rank's images, divided by those of the whole batch.
            right: how many of this rank's images were classified rightly.
            size: images of the whole batch.
            rate: the learning rate.
        """
        self._losses[len(self._sizes)] = loss
        self._right += right
        self._sizes.append(size)
        self.rates.append(rate)

    def read(self) -> tuple[list[float], list[int], int]:
        """The mean loss of each batch, its size, and the right answers of them all; waits for the device."""
        losses = self._world.add(self._losses[: self.steps].clone())
        return losses.tolist(), self._sizes, int(self._world.add(self._right.clone()))

    def check_finite(self, epoch: int) -> None:
        """Wait for the device and look at the losses so far.

        Raises:
            TrainingError: one was not finite; names the first step where it was not.
        """
        for step, value in enumerate(self.read()[0]):
            if not math.isfinite(value):
                raise not_finite(value, epoch, step, self.rates[step])

    def state_dict(self) -> dict[str, Any]:
        """All of it, of all ranks, as plain values and CPU tensors."""
        return {
            "losses": self._world.add(self._losses.clone()).cpu(),
            "right": int(self._world.add(self._right.clone())),
            "sizes": list(self._sizes),
            "rates": list(self.rates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        if self._world.main:  # the sums of all ranks, of which there may be another number now
            self._losses.copy_(state["losses"])
            self._right.fill_(state["right"])
        self._sizes, self.rates = list(state["sizes"]), list(state["rates"])


def not_finite(loss: float, epoch: int, step: int, rate: float) -> TrainingError:
    """The error for a loss that is NaN or infinite; epochs and steps count from 0 here and from 1 in the message."""
    return TrainingError(
        f"the loss is {loss} in epoch {epoch + 1}, step {step + 1}, at learning rate {rate:g}; "
        "try a smaller optimizer.lr"
    )


class TrainingPass:
    """A training epoch under way: how far it is, and what it took until now; can be kept and gone on with.

    Args:
        watch_every: of how many steps of the run one is watched; None is none.
    """

    def __init__(
        self, epoch: int, steps: int, device: torch.device, watch_every: int | None = None, world: World = ALONE
    ) -> None:
        self.epoch = epoch
        self.world = world
        self.tally = Tally(steps, device, world)
        self._steps, self._watch_every, self._device = steps, watch_every, device
        self._norms: dict[int, Tensor] = {}  # by the step of the epoch; on the device until the pass is read
        self._before: Mapping[str, float] = {}  # of earlier sittings

    def begin(self, step: Step) -> None:
        """Start the timer, with the device at rest; what the step compiles from now on does not count."""
        self._gradient, self._compiled_s = step.gradient, step.gradient.compile_s
        self.timer = EpochTimer(self._device)

    def watch(self, model: nn.Module) -> None:
        """Take the norm of the gradients, if this step is watched; nothing is read back from the device."""
        step = self.tally.steps
        if self._watch_every and (self.epoch * self._steps + step) % self._watch_every == 0:
            gradients = [value.grad for value in model.parameters() if value.grad is not None]
            self._norms[step] = nn.utils.get_total_norm(gradients)

    def watched(self) -> list[StepFigures]:
        """The steps that were watched so far; waits for the device."""
        losses, norms = self.tally.read()[0], self._read_norms()
        return [
            StepFigures(
                step=self.epoch * self._steps + step,
                loss=losses[step],
                lr=self.tally.rates[step],
                grad_norm=norm if math.isfinite(norm) else None,
            )
            for step, norm in norms.items()
        ]

    def _read_norms(self) -> dict[int, float]:
        return dict(zip(self._norms, torch.stack([*self._norms.values()]).tolist(), strict=True)) if self._norms else {}

    def figures(self) -> PassFigures:
        """What came of it so far; waits for the device.

        Raises:
            TrainingError: a loss was not finite.
        """
        self.tally.check_finite(self.epoch)
        return _figures(self.tally, self._seconds())

    def state_dict(self) -> dict[str, Any]:
        """All of it for a checkpoint; waits for the device."""
        return {"tally": self.tally.state_dict(), "seconds": self._seconds(), "norms": self._read_norms()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.tally.load_state_dict(state["tally"])
        self._before = dict(state["seconds"])
        self._norms = {step: torch.tensor(norm, device=self._device) for step, norm in state.get("norms", {}).items()}

    def _seconds(self) -> dict[str, float]:
        sitting = _seconds(self.timer, self._gradient.compile_s - self._compiled_s)
        return {name: self._before.get(name, 0.0) + seconds for name, seconds in sitting.items()}


def train_epoch(
    step: Step,
    loader: Loader,
    current: TrainingPass,
    device: torch.device,
    advance: Callable[[EpochTimer], object] = lambda timer: None,
) -> PassFigures:
    """Train on an epoch of the loader from the pass's next batch on, a step a batch.

    Nothing is read back from a GPU before the end of the epoch. On the CPU, where it costs nothing, a loss that is not
    finite ends the epoch at once, if no other process has to hear of it.

    Args:
        current: the epoch, and how much of it is done.
        advance: called after each step with the pass's timer, for a progress bar, or to save.

    Raises:
        TrainingError: a loss was not finite; names the first step where it was not.
    """
    step.model.train()
    epoch, done, order = current.epoch, current.tally.steps, loader.order
    at_once = device.type == "cpu" and current.world.size == 1
    current.begin(step)
    timer = current.timer
    keys = step.gradient.preprocess.keys(order, epoch, done)  # counted as "other": needed with every loader
    for delivered, batch_keys in timer.waiting(zip(step.batches(loader, epoch, done), keys, strict=False)):
        rate, number = step.rate, current.tally.steps
        batch, size = delivered, order.whole.count(number)
        if not order.count(number):  # a last batch too small for all ranks
            batch = (delivered[0], torch.full_like(delivered[1], IGNORED))
        loss, right = step(batch, batch_keys, current.watch, size)
        if at_once and not loss.isfinite():
            raise not_finite(float(loss), epoch, number, rate)
        current.tally.add(loss, right, size, rate)
        timer.begin("other")
        advance(timer)
    timer.stop()
    return current.figures()


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    device: torch.device,
    advance: Callable[[EpochTimer], object] = lambda timer: None,
    world: World = ALONE,
) -> tuple[PassFigures, Predictions]:
    """Run the model over the loader's epoch 0 without changing it, whole and in float32; `advance` as in training.

    Several ranks evaluate a part each, and all have the figures and predictions of every image.
    """
    model.eval()
    order = loader.order
    confidence, taken_for = [], []
    tally = Tally(len(loader), device, world)
    timer = EpochTimer(device)
    with torch.inference_mode():
        for images, labels in timer.waiting(loader.epoch(0)):
            own, size = order.count(tally.steps), order.whole.count(tally.steps)
            logits, wanted = model(preprocess(images))[:own], labels[:own]
            probability, label = logits.softmax(dim=1).max(dim=1)
            tally.add(F.cross_entropy(logits, wanted, reduction="sum") / size, (label == wanted).sum(), size)
            confidence.append(probability)
            taken_for.append(label)
            timer.begin("other")
            advance(timer)
    timer.stop()
    figures = _figures(tally, _seconds(timer))
    return figures, _of_all(Predictions(torch.cat(taken_for), torch.cat(confidence)), order, world)


def _of_all(own: Predictions, order: EpochOrder, world: World) -> Predictions:
    """The predictions of all ranks, in the order of the split."""
    if world.size == 1:
        return own
    places = order.indices(0, device=own.labels.device)[: len(own.labels)]  # what does not count comes last
    size = order.whole.size
    return Predictions(
        *(world.add(part.new_zeros(size).index_copy_(0, places, part)) for part in (own.labels, own.confidence))
    )


def _seconds(timer: EpochTimer, compiling: float = 0.0) -> dict[str, float]:
    """Seconds of a pass: all of it but saving, and three of its phases; compiling happens while computing."""
    computing, waiting = timer.seconds("computing") - compiling, timer.seconds("waiting")
    whole = computing + waiting + timer.seconds("other")
    return {"seconds": whole, "waiting": waiting, "computing": computing, "saving": timer.seconds("saving")}


def _figures(tally: Tally, seconds: Mapping[str, float]) -> PassFigures:
    losses, sizes, right = tally.read()
    images = sum(sizes)
    # A short last batch weighs as many images as it has.
    total = math.fsum(loss * size for loss, size in zip(losses, sizes, strict=True))
    return PassFigures(
        images=images,
        loss=total / images,
        accuracy=100 * right / images,
        seconds=seconds["seconds"],
        data_wait_s=seconds["waiting"],
        compute_s=seconds["computing"],
        save_s=seconds["saving"],
    )
