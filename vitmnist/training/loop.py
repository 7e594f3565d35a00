"""The only loop there is: one epoch of training, and one pass of evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.distributed import ALONE, SingleProcess
from vitmnist.runtime.timer import EpochTimer
from vitmnist.training.metrics import MetricAccumulator, PassFigures, Predictions, StepFigures, not_finite
from vitmnist.training.step import IGNORED, Step


class TrainingPass:
    """A training epoch under way: how far it is, and what it took until now; can be kept and gone on with.

    Args:
        watch_every: of how many steps of the run one is watched; None is none.
    """

    def __init__(
        self, epoch: int, steps: int, device: torch.device, watch_every: int | None = None, world: SingleProcess = ALONE
    ) -> None:
        self.epoch = epoch
        self.world = world
        self.tally = MetricAccumulator(steps, device, world)
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
    epoch, done, sampler = current.epoch, current.tally.steps, loader.sampler
    at_once = device.type == "cpu" and current.world.size == 1
    current.begin(step)
    timer = current.timer
    keys = step.gradient.preprocess.keys(sampler, epoch, done)  # counted as "other": needed with every loader
    for delivered, batch_keys in timer.waiting(zip(step.batches(loader, epoch, done), keys, strict=False)):
        rate, number = step.rate, current.tally.steps
        batch, size = delivered, sampler.global_sampler.num_valid(number)
        if not sampler.num_valid(number):  # a last batch too small for all ranks
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
    world: SingleProcess = ALONE,
) -> tuple[PassFigures, Predictions]:
    """Run the model over the loader's epoch 0 without changing it, whole and in float32; `advance` as in training.

    Several ranks evaluate a part each, and all have the figures and predictions of every image.
    """
    model.eval()
    sampler = loader.sampler
    confidence, taken_for = [], []
    tally = MetricAccumulator(len(loader), device, world)
    timer = EpochTimer(device)
    with torch.inference_mode():
        for images, labels in timer.waiting(loader.epoch(0)):
            own, size = sampler.num_valid(tally.steps), sampler.global_sampler.num_valid(tally.steps)
            logits, wanted = model(preprocess(images))[:own], labels[:own]
            probability, label = logits.softmax(dim=1).max(dim=1)
            tally.add(F.cross_entropy(logits, wanted, reduction="sum") / size, (label == wanted).sum(), size)
            confidence.append(probability)
            taken_for.append(label)
            timer.begin("other")
            advance(timer)
    timer.stop()
    figures = _figures(tally, _seconds(timer))
    return figures, _all_ranks(Predictions(torch.cat(taken_for), torch.cat(confidence)), sampler, world)


def _all_ranks(own: Predictions, sampler: EpochSampler, world: SingleProcess) -> Predictions:
    """The predictions of all ranks, in the order of the split."""
    if world.size == 1:
        return own
    places = sampler.indices(0, device=own.labels.device)[: len(own.labels)]  # what does not count comes last
    size = sampler.global_sampler.size
    return Predictions(
        *(
            world.all_reduce_sum(part.new_zeros(size).index_copy_(0, places, part))
            for part in (own.labels, own.confidence)
        )
    )


def _seconds(timer: EpochTimer, compiling: float = 0.0) -> dict[str, float]:
    """Seconds of a pass: all of it but saving, and three of its phases; compiling happens while computing."""
    computing, waiting = timer.seconds("computing") - compiling, timer.seconds("waiting")
    whole = computing + waiting + timer.seconds("other")
    return {"seconds": whole, "waiting": waiting, "computing": computing, "saving": timer.seconds("saving")}


def _figures(tally: MetricAccumulator, seconds: Mapping[str, float]) -> PassFigures:
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
