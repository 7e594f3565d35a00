"""How a step runs its model: eagerly, as compiled code or as a CUDA graph, and wrapped by DDP with several ranks."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.errors import first_line
from vitmnist.losses import Loss
from vitmnist.metrics import BatchMetricInfo, MetricCollection
from vitmnist.runtime.world import World
from vitmnist.training.batch import Batch
from vitmnist.training.fine_tuning import BATCH_NORMS
from vitmnist.training.step_options import StepOptions

log = logging.getLogger(__name__)

MetricSums = dict[str, Tensor]
"""`loss`, and each metric by its name, summed over images: scalar tensors on the device."""
AUTOCAST_DTYPES = {Precision.bf16.value: torch.bfloat16, Precision.fp16.value: torch.float16}
"""The dtype of `torch.autocast` for each `trainer.precision` that uses it."""


class ForwardPass(nn.Module):
    """Preprocessing, model, loss and metrics as one module that can be compiled, captured or wrapped by DDP.

    With `precision=bf16` or `fp16`, the model runs under `torch.autocast`; the weights, the gradients and the loss are
    float32.
    """

    def __init__(
        self, model: nn.Module, preprocess: Preprocess, precision: str, loss: Loss, metrics: MetricCollection
    ) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # DDP would broadcast the constants of a submodule in each step.
        self._metrics = metrics.of_kind(BatchMetricInfo)
        self._device_type = preprocess.mean.device.type
        self._autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> MetricSums:
        """Return the sums over the images of `Batch.tensors()`."""
        labels = inputs["labels"]
        images = self._preprocess(inputs["images"], inputs.get("random_keys"))
        with torch.autocast(self._device_type, self._autocast_dtype) if self._autocast_dtype else nullcontext():
            logits = self.model(images)
        logits = logits.float()
        loss = self._loss(logits, inputs.get("targets", labels))
        logits = logits.detach()
        return {"loss": loss, **{name: compute(logits, labels) for name, compute in self._metrics.items()}}


class GraphedModule(nn.Module):
    """Runs forward and backward of a module as CUDA graphs, one for each shape and dtype of inputs passed to `capture`.

    With small batches, the host needs longer to launch the kernels of a step than the GPU needs to run them; a graph
    launches them at once. Other inputs run eagerly, because a replay would silently broadcast and convert them. Each
    replay writes its outputs and gradients to the same memory, so the caller must copy the outputs, and set the
    gradients to None before each call. The parameters must not move in memory.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[object, Callable[[dict[str, Tensor]], MetricSums]] = {}
        """The graphs by the names, shapes and dtypes of their inputs."""

    def capture(self, inputs: dict[str, Tensor]) -> None:
        """Capture forward and backward for inputs of these shapes and dtypes, unless they were captured before.

        No other thread may allocate GPU memory during the capture. Raises `RuntimeError` if the module waits for the
        GPU, or does anything else that cannot be captured.
        """
        if _signature(inputs) in self._graphs:
            return
        samples = {name: tensor.clone() for name, tensor in inputs.items()}
        self.module.zero_grad()
        # Torch warns that the graph keeps autograd nodes of the capture stream alive. This is intended.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        make_graphs: Callable[..., Any] = torch.cuda.make_graphed_callables
        # Torch replaces the `forward` method of its argument. Wrap the module so that it stays as it is.
        wrapper = nn.Sequential(self.module)
        self._graphs[_signature(inputs)] = make_graphs(wrapper, (samples,), allow_unused_input=True)

    def forward(self, inputs: dict[str, Tensor]) -> MetricSums:
        return self._graphs.get(_signature(inputs), self.module)(inputs)


def _signature(inputs: dict[str, Tensor]) -> object:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())


@dataclass(eq=False)
class ModelRunner:
    """Divides the batches of a step into microbatches, and computes the loss of each.

    Compiled code sees a single shape: a short microbatch is padded with images labelled `PADDING_LABEL`. With batch
    normalisation, padding would change the statistics of the batch, so a short microbatch then runs eagerly.

    Args:
        model: returns logits `[B, classes]`.
        batch_size: images per batch of this rank; the last batch may be smaller.
        options: the options of the step. `prepare` replaces a value of `auto` that fails, and records the reason.
        frozen_batch_norms: batch normalisations whose running statistics do not change in training.
        metrics: the metrics of the run; by default all registered metrics.
    """

    model: nn.Module
    preprocess: Preprocess
    loss: Loss
    batch_size: int
    options: StepOptions = field(default_factory=StepOptions)
    frozen_batch_norms: Sequence[nn.Module] = ()
    metrics: MetricCollection = field(default_factory=MetricCollection)

    def __post_init__(self) -> None:
        self.compile_s = 0.0
        """The seconds spent on compiling or on capturing graphs."""
        self._was_prepared = False
        # Divide a batch into the fewest microbatches of at most `micro_batch` images, all of nearly the same size.
        self._num_microbatches = math.ceil(self.batch_size / (self.options.micro_batch or self.batch_size))
        self.microbatch_size = math.ceil(self.batch_size / self._num_microbatches)
        self._build_module()
        self.train_mode()  # `prepare` compiles the code of this mode.
        self.has_batch_norm = any(isinstance(layer, BATCH_NORMS) and layer.training for layer in self.model.modules())
        """Whether the output for an image depends on its microbatch."""
        if self.has_batch_norm and self.microbatch_size < self.batch_size:
            log.warning(
                "trainer.micro_batch=%d: the model has batch normalisation, which takes its statistics from a "
                "microbatch; trainer.micro_batch=null takes them from the whole batch",
                self.options.micro_batch,
            )

    def _build_module(self) -> None:
        """Build the module that computes the loss: eager, compiled or graphed. `wrap_ddp` wraps it."""
        module = ForwardPass(self.model, self.preprocess, self.options.precision, self.loss, self.metrics)
        self._mix_batch = self.preprocess.mix_batch
        if self.options.compile:  # The first call compiles.
            module.compile(fullgraph=True, dynamic=False)
            self._mix_batch = torch.compile(self._mix_batch, fullgraph=True, dynamic=False)
        self._module: nn.Module = GraphedModule(module) if self.options.graph else module

    def train_mode(self) -> None:
        """Set the model to training mode, except frozen batch normalisations."""
        self.model.train()
        for norm in self.frozen_batch_norms:
            norm.eval()

    def prepare_microbatches(self, batch: Batch) -> list[Batch]:
        """Pad a batch for compiled code, mix its images if configured, and divide it into microbatches."""
        count = math.ceil(len(batch) / self.microbatch_size)  # Leave out the microbatches that only padding fills.
        if self.options.compile and not self.has_batch_norm:
            batch = batch.padded(self._num_microbatches * self.microbatch_size)
        if self.preprocess.has_mixing:
            assert batch.random_keys is not None
            # Mix the whole batch at once: the partner of an image must not depend on the microbatch size.
            with self._eager_if(len(batch) < self.batch_size):
                images, targets = self._mix_batch(batch.images, batch.labels, batch.random_keys)
            batch = Batch(images, batch.labels, batch.global_size, targets=targets)
        return list(islice(batch.microbatches(self.microbatch_size), count))

    def compute_sums(self, micro: Batch) -> MetricSums:
        """Compute the loss and the metrics of a microbatch."""
        with self._eager_if(len(micro) < self.microbatch_size):
            sums: MetricSums = self._module(micro.tensors())
            return sums

    def _eager_if(self, is_eager: bool) -> AbstractContextManager[object]:
        """Skip compiled code if `is_eager`, for example for a short batch, which would trigger a recompilation."""
        return torch.compiler.set_stance("force_eager") if self.options.compile and is_eager else nullcontext()

    def wrap_ddp(self, world: World) -> None:
        """Let each backward pass average the gradients over the ranks."""
        self._module = world.wrap_ddp(self._module)

    def skip_all_reduce(self) -> AbstractContextManager[object]:
        """Return a context in which a backward pass adds to the gradients of this rank only."""
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else nullcontext()

    def prepare(self, batch: Batch) -> None:
        """Compile the code or capture a graph for batches of this size and dtype.

        If `trainer.compile=auto` or `trainer.graph=auto` fails, the code stays eager; `options` has the reason. This
        changes the gradients, the model's buffers and the random state.

        Raises:
            ConfigError: `trainer.compile=true` or `trainer.graph=true` failed.
        """
        started = time.perf_counter()
        if not self._was_prepared:
            if self.options.compile:
                log.info("compiling the step, which may take a minute")
            # Call the model eagerly first. An error in the model is then not mistaken for a failed compilation, and
            # libraries such as einops fill their caches, which would otherwise cause a recompilation.
            with self._eager_if(True):
                self._forward_backward(batch)
        try:
            if isinstance(self._module, GraphedModule):
                (whole,) = self.prepare_microbatches(batch)
                self._module.capture(whole.tensors())
            else:
                self._compile(batch)
        except Exception as error:  # Dynamo, inductor and CUDA raise many types.
            self.options = self.options.fall_back(first_line(error))
            self._build_module()
            log.info("the step stays eager:\n%s", self.options.describe())
        else:
            self._was_prepared = True
            self.compile_s += time.perf_counter() - started

    def _compile(self, batch: Batch) -> None:
        """Compile the code, or load it from torch's cache, as the later jobs of a sweep do."""
        try:
            self._forward_backward(batch)
        except Exception:
            torch.compiler.reset()  # Earlier jobs may have used up torch's limit of compiled versions.
            self._forward_backward(batch)

    def _forward_backward(self, batch: Batch) -> None:
        for micro in self.prepare_microbatches(batch):
            self.compute_sums(micro)["loss"].backward()
