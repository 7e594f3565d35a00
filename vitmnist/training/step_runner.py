"""Runs the model and the loss on a microbatch: eagerly, compiled, or as a CUDA graph."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.losses import Loss
from vitmnist.metrics import get_batch_metrics
from vitmnist.runtime.world import World
from vitmnist.training.batch import Batch
from vitmnist.training.fine_tuning import BATCH_NORMS

log = logging.getLogger(__name__)

Sums = dict[str, Tensor]
"""Sums over this rank's images, as scalar tensors on the device: `loss`, and each metric of a batch by its name."""
AUTOCAST_DTYPES = {Precision.bf16.value: torch.bfloat16, Precision.fp16.value: torch.float16}
"""The dtype of `torch.autocast` for each `trainer.precision` that uses it."""


class StepRunner:
    """Divides a batch into microbatches, and computes the summed loss and metrics of each.

    The runner is eager until `use_compiled` or `capture`. With `precision=bf16` or `fp16`, the model runs under
    `torch.autocast`; the weights, the gradients and the loss are float32.

    Args:
        model: returns logits `[B, classes]`.
        batch_size: images per batch of this rank; the last batch may be smaller.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        loss: Loss,
        batch_size: int,
        micro_batch: int | None = None,
        precision: str = Precision.fp32.value,
    ) -> None:
        self.model, self.preprocess = model, preprocess
        self.batch_size = batch_size
        # Divide a batch into the fewest microbatches of at most `micro_batch` images, all of nearly the same size.
        self.microbatch_size = math.ceil(batch_size / math.ceil(batch_size / (micro_batch or batch_size)))
        self._loss = loss
        self.use_eager(precision)

    def use_eager(self, precision: str) -> None:
        """Run without compiled code and graphs, in this precision."""
        self.uses_tf32 = precision == Precision.tf32
        self.eager_module = ModelAndLoss(self.model, self.preprocess, precision, self._loss)
        self.active_module: nn.Module = self.eager_module
        """The model and the loss: eager, compiled or graphed. With several ranks, DDP wraps the module."""
        self.mix_batch = self.preprocess.mix_batch
        """Augments and mixes a batch, eagerly or compiled. It is called only if the augmentation mixes images."""
        self.short_batches: Literal["unchanged", "padded", "eager"] = "unchanged"
        """How short batches run. Compiled code sees a single shape: short batches are padded with `IGNORED` images, or
        run eagerly if padding would change the statistics of batch normalisation."""

    def use_compiled(self) -> None:
        """Compile the module and the mixing at their next calls."""
        self.active_module = torch.compile(self.eager_module, fullgraph=True, dynamic=False)  # type: ignore[assignment]
        self.mix_batch = torch.compile(self.preprocess.mix_batch, fullgraph=True, dynamic=False)
        self.short_batches = "eager" if self.has_batch_norm else "padded"

    def capture(self, batch: Batch) -> None:
        """Capture the module as a CUDA graph for batches like `batch`; see `GraphedModule.capture`."""
        if not isinstance(self.active_module, GraphedModule):
            self.active_module = GraphedModule(self.eager_module)
        with self.matmul_precision():
            if self.preprocess.has_mixing:
                batch = self._mix(batch)
            self.model.zero_grad()
            self.active_module.capture(batch.tensors())

    def distribute(self, world: World) -> None:
        """Let each backward pass average the gradients over the ranks."""
        self.active_module = world.wrap_ddp(self.active_module)

    @property
    def is_eager(self) -> bool:
        """Whether the module is neither compiled nor graphed."""
        return self.active_module is self.eager_module

    @property
    def has_batch_norm(self) -> bool:
        """Whether a batch normalisation is in training mode, so that an image's output depends on its batch."""
        return any(isinstance(module, BATCH_NORMS) and module.training for module in self.model.modules())

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Return the microbatches of a batch. If configured, pad the batch and mix its images first."""
        count = math.ceil(len(batch) / self.microbatch_size)
        must_mix = self.preprocess.has_mixing
        if self.short_batches == "padded":
            length = self.batch_size if must_mix else len(batch)
            batch = batch.padded(math.ceil(length / self.microbatch_size) * self.microbatch_size)
        if must_mix:
            batch = self._mix(batch)
        # In a mixed batch, padding can fill whole microbatches. Leave them out.
        return list(islice(batch.microbatches(self.microbatch_size), count))

    def __call__(self, micro: Batch) -> Sums:
        """Return the summed loss and metrics of a microbatch, not divided by the size of the batch."""
        with self._eager_for_short_batches(len(micro) == self.microbatch_size):
            sums: Sums = self.active_module(micro.tensors())
        return sums

    def skip_all_reduce(self) -> AbstractContextManager[object]:
        """Skip DDP's all-reduce within the block: gradients accumulate on this rank."""
        module = self.active_module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    @contextmanager
    def matmul_precision(self) -> Iterator[None]:
        """Use TF32 for the float32 matrix products within the block, if configured. Evaluation never uses TF32."""
        if not self.uses_tf32:
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _mix(self, batch: Batch) -> Batch:
        assert batch.keys is not None
        # Mix the whole batch at once: the partner of an image must not depend on the microbatch size.
        with self._eager_for_short_batches(len(batch) == self.batch_size):
            images, targets = self.mix_batch(batch.images, batch.labels, batch.keys)
        return Batch(images, batch.labels, batch.global_size, targets=targets)

    def _eager_for_short_batches(self, is_full: bool) -> AbstractContextManager[object]:
        must_be_eager = self.short_batches == "eager" and not is_full
        return torch.compiler.set_stance("force_eager") if must_be_eager else nullcontext()


class ModelAndLoss(nn.Module):
    """Preprocessing, model, loss and metrics as one module that can be compiled, captured or wrapped by DDP."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: str, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # DDP would broadcast the constants of a submodule in each step.
        self._metrics = get_batch_metrics()  # Compiled code cannot access the registry.
        self._device_type = preprocess.mean.device.type
        self._autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Sums:
        """Return the sums for `Batch.tensors()`; the loss is not divided by the batch size."""
        labels = inputs["labels"]
        images = self._preprocess(inputs["images"], inputs.get("keys"))
        with torch.autocast(self._device_type, self._autocast_dtype) if self._autocast_dtype else nullcontext():
            logits = self.model(images)
        logits = logits.float()
        loss = self._loss(logits, inputs.get("targets", labels))
        logits = logits.detach()
        return {"loss": loss} | {name: compute(logits, labels) for name, compute in self._metrics.items()}


class GraphedModule(nn.Module):
    """Replays the forward and backward pass as a CUDA graph. The GPU then does not wait for Python.

    With small batches, the host needs longer to launch the kernels of a step than the GPU needs to run them. A graph
    launches all of them at once (`torch.cuda.make_graphed_callables`). Inputs whose names, shapes or dtypes were not
    captured go through the module itself, because a replay would silently broadcast and convert them. Each replay
    writes its outputs and gradients to the same memory, so the caller must copy the outputs, and set the gradients to
    None before each call. The parameters of the module must not move in memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[object, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._graphs.get(_signature(inputs), self.module)(inputs)

    def capture(self, inputs: dict[str, Tensor]) -> None:
        """Capture forward and backward for inputs of these names, shapes and dtypes, unless they were captured before.

        No other thread may allocate GPU memory during the capture. The capture changes the module's buffers, such as
        the statistics of batch normalisation, and the random state. Raises `RuntimeError` if the module waits for the
        GPU, or does anything else that cannot be captured.
        """
        if _signature(inputs) in self._graphs:
            return
        samples = {name: tensor.clone() for name, tensor in inputs.items()}
        # Torch warns that the graph keeps autograd nodes of the capture stream alive. This is intended.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        make_graphs: Callable[..., Any] = torch.cuda.make_graphed_callables
        # Torch replaces the `forward` method of its argument. Wrap `self.module` so that it stays as it is.
        wrapper = nn.Sequential(self.module)
        self._graphs[_signature(inputs)] = make_graphs(wrapper, (samples,), allow_unused_input=True)


def _signature(inputs: dict[str, Tensor]) -> object:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
