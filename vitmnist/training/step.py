"""A training step, from a batch to changed weights."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.config.schema import Precision
from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.optim.ema import EMA
from vitmnist.runtime.device import Accelerator
from vitmnist.runtime.distributed import SingleProcess
from vitmnist.runtime.timer import synchronize


class Step:
    """Gradient, optimizer, average and schedule, each moved on once a batch.

    Args:
        average: of the weights; None keeps none.
    """

    def __init__(
        self, gradient: Gradient, optimizer: Optimizer, schedule: LRScheduler, average: EMA | None = None
    ) -> None:
        self.gradient, self.optimizer, self.schedule, self.average = gradient, optimizer, schedule, average
        self._captured: Any = None

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.gradient.model

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and kept: the averaged one, where there is an average."""
        return self.average.model if self.average else self.model

    @property
    def rate(self) -> float:
        """The learning rate of the step that comes now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def batches(self, loader: Loader, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        """What a call takes of each batch of an epoch: images and labels, or indices, where it gathers them itself."""
        return self._captured.batches(loader, epoch, start) if self._captured else loader.epoch(epoch, start)

    def __call__(
        self,
        batch: tuple[Tensor, ...],
        keys: Tensor | None,
        watch: Callable[[nn.Module], object] = lambda model: None,
        size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take a step; the batch's mean loss and how many of its images were classified rightly, on the device.

        Args:
            batch: as `batches` gives it.
            keys: int64 `[B]`, what the batch's augmentation is drawn from; None if it has none.
            watch: is given the model when it has its gradient.
            size: images of the whole batch, where this is one rank's part of it; the loss is that part's share.
        """
        if self._captured:
            figures = self._captured(batch, keys)
            watch(self.model)
        else:
            images, labels = batch
            figures = self.gradient(images, labels, keys, size)
            watch(self.model)  # some optimizers write into the gradient
            self.optimizer.step()
            if self.average:
                self.average.take_in(self.average.next_weight())
        self.schedule.step()
        return figures

    def capture(self, loader: Loader, accelerator: Accelerator) -> None:
        """From now on replay the step as one graph of the device's; weights and state stay as they are.

        The graph would not see a state that is loaded into the optimizer later: restore a run first. The seconds that
        it takes are added to the gradient's `compile_s`.

        Raises:
            RuntimeError: the model does something that cannot be recorded; the step goes on as before.
        """
        from vitmnist.training.cuda_graph import CapturedStep

        started, before, padding = time.perf_counter(), self.gradient.compile_s, self.gradient.padding
        self.model.train()
        self.gradient.padding = True
        keys = next(self.gradient.preprocess.keys(loader.sampler, 0))
        with closing(loader.epoch(0)) as batches:
            batch = next(batches)
        parts = (self.optimizer, self.average, batch, keys, loader.resident, accelerator)
        try:
            with self.gradient.random_state_kept():
                self._captured = self.gradient.within_memory(lambda: CapturedStep(self.gradient, *parts))
        except RuntimeError:
            self.gradient.padding = padding
            raise
        self.gradient.compile_s = before + time.perf_counter() - started


log = logging.getLogger(__name__)


Result = TypeVar("Result")


IGNORED = -100  # a label that cross_entropy leaves out: no loss, no gradient


class Gradient:
    """Leaves the gradient of a batch's mean loss in the model's parameters.

    Whatever is chosen, it is the gradient of the whole batch: a short piece, or a short last batch, weighs as many
    images as it has. It differs from that of one float32 pass by rounding alone: summed in another order, or
    multiplied with fewer digits. For the articles' transformer the norm of the difference is below 1e-5 of the
    gradient's norm with pieces and compiled, and below 2% with bf16 (`tests/test_training.py`). That does not hold of
    models whose answer for an image depends on the others in its batch, as with batch normalisation, or that draw.

    Args:
        model: gives logits `[B, classes]`.
        preprocess: what happens to images before the model sees them.
        batch_size: images in a batch; a last one may have fewer.
        micro_batch: images at once, at most; pieces are as even as can be. None takes the batch whole. Where a CUDA
            device runs out of memory, a number is halved, and the step begun again.
        precision: of the products; weights, their gradient and the loss are float32 in any case. `tf32` rounds the
            factors of matrix products to 10 bits on the GPU's tensor cores; `bf16` runs what bears it in bfloat16
            (8 bits), by `torch.autocast`.
        label_smoothing: the share of each label that is spread over all classes (Szegedy et al., arXiv:1512.00567).
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        batch_size: int,
        micro_batch: int | None = None,
        precision: Precision = Precision.fp32,
        label_smoothing: float = 0.0,
    ) -> None:
        self.model, self.preprocess = model, preprocess
        self.batch_size, self.micro_batch = batch_size, micro_batch
        self.label_smoothing = label_smoothing
        self.compile_s = 0.0
        """Seconds that compiling took."""
        self.padding = False
        """Whether every piece must have the same shape, and a short one is filled up with images that do not count."""
        self.device = preprocess.mean.device
        self.compiled = False
        """Whether compiled code is at work."""
        self._precision = precision
        self._plain = _SumOfLosses(model, preprocess, precision, label_smoothing)
        self._losses: nn.Module = self._plain
        self._ranks = 1

    @property
    def piece(self) -> int:
        """Images at once."""
        pieces = math.ceil(self.batch_size / (self.micro_batch or self.batch_size))
        return math.ceil(self.batch_size / pieces)

    def __call__(
        self, images: Tensor, labels: Tensor, keys: Tensor | None = None, size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of a batch; its mean loss, and how many of its images were classified rightly, on the device.

        Args:
            images, labels: a batch as loaders deliver them.
            keys: int64 `[B]`, what its augmentation is drawn from.
            size: images of the whole batch, where this is one rank's part of it; the loss is that part's share.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the piece, and it may not be halved.
        """
        return self.within_memory(lambda: self.accumulate(images, labels, keys, size or len(labels)))

    def within_memory(self, work: Callable[[], Result]) -> Result:
        """Do `work`, with ever smaller pieces if the device has no memory for it; raises as a call does."""
        halved = False
        while True:
            started = time.perf_counter()
            try:
                result = work()
                if halved and self.compiled:
                    synchronize(self.device)
                    self.compile_s += time.perf_counter() - started
                return result
            except torch.OutOfMemoryError as error:
                # Other ranks may have added up a part of this step's gradient already.
                if self.micro_batch is None or self.piece == 1 or self._ranks > 1:
                    raise
                reason = str(error).splitlines()[0]
            halved = True
            # Outside of the handler: until it is left, the error keeps all that it was about to free.
            self.model.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.micro_batch = math.ceil(self.piece / 2)
            if self.compiled:
                torch.compiler.reset()  # it is compiled anew for the new shape, and torch keeps few of them
            log.warning("out of memory (%s); going on with trainer.micro_batch=%d", reason, self.micro_batch)

    def accumulate(
        self, images: Tensor, labels: Tensor, keys: Tensor | None, size: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """As a call, with the pieces as they are now.

        Args:
            size: how many of the images count, by which the sum of their losses is divided.
        """
        self.model.zero_grad()
        total = torch.zeros((), device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._matrix_products():
            for start in range(0, len(labels), self.piece):
                rows = slice(start, start + self.piece)
                with self._kept_to_itself(rows.stop < len(labels)):
                    losses, correct = self._losses(
                        *self._filled_up(images[rows], labels[rows], None if keys is None else keys[rows])
                    )
                    loss = losses / size
                    # The ranks' gradients are averaged, and their sum is wanted.
                    (loss * self._ranks).backward()
                total += loss.detach()
                right += correct
        return total, right

    def compile(self, images: Tensor, labels: Tensor, keys: Tensor | None) -> str | None:
        """Compile preprocessing, model and loss together, forward and backward; why not, if that cannot be.

        A batch goes through a few times. Nothing stays of it but the seconds it took, in `compile_s`.
        """
        started, before = time.perf_counter(), self.compile_s
        with self.random_state_kept():
            # What libraries note at their first call, as einops does, would be found changed at the second, and
            # compiled for anew.
            self(images, labels, keys)
        if not self.compiled:
            torch.compiler.reset()  # of models before this one, as in a sweep: so many are kept and no more
            self._losses = torch.compile(self._plain, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            self.compiled = self.padding = True
        try:
            with self.random_state_kept():
                for _ in range(2):
                    self(images, labels, keys)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._losses = self._plain
            self.compiled = self.padding = False
            return _reason(error)
        finally:
            self.model.zero_grad()
        self.compile_s = before + time.perf_counter() - started
        return None

    def distribute(self, world: SingleProcess) -> None:
        """From now on a call leaves the gradient of the whole batch, of which each rank has a part.

        torch's `DistributedDataParallel` adds the parts up while the backward pass goes on.
        """
        if world.size > 1:
            self._losses, self._ranks = world.wrap_ddp(self._losses), world.size

    def random_state_kept(self) -> AbstractContextManager[None]:
        """Within, what a model draws is drawn again afterwards."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _kept_to_itself(self, more: bool) -> AbstractContextManager[object]:
        """Whether the gradient of a piece waits for those of the pieces that follow, before it is added up."""
        if isinstance(self._losses, DistributedDataParallel) and more:
            return self._losses.no_sync()
        return nullcontext()

    def _filled_up(self, images: Tensor, labels: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        missing = self.piece - len(labels)
        if not self.padding or not missing:
            return images, labels, keys
        return (
            torch.cat([images, images.new_zeros((missing, *images.shape[1:]))]),
            torch.cat([labels, labels.new_full((missing,), IGNORED)]),
            None if keys is None else torch.cat([keys, keys.new_zeros(missing)]),
        )

    def _matrix_products(self) -> AbstractContextManager[object]:
        return _tf32() if self._precision == Precision.tf32 else nullcontext()


class _SumOfLosses(nn.Module):
    """From images to the sum of their losses, and the right answers: one module, to be compiled or distributed."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: Precision, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # no part of this module: ranks need not tell each other its constants
        self._device_type = preprocess.mean.device.type
        self._half, self._label_smoothing = precision == Precision.bf16, label_smoothing

    def forward(self, images: Tensor, labels: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        images = self._preprocess(images, keys)
        with torch.autocast(self._device_type, torch.bfloat16) if self._half else nullcontext():
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self._label_smoothing)
        return loss, (logits.detach().argmax(dim=1) == labels).sum()


@contextmanager
def _tf32() -> Iterator[None]:
    products = torch.backends.cuda.matmul  # torch lets convolutions use it anyway
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        yield
    finally:
        products.fp32_precision = before


def _reason(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
