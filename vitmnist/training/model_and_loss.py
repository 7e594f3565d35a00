"""Model, loss and metrics as one module, which a step can run eagerly, compile, or capture as a CUDA graph."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.losses import Loss
from vitmnist.metrics import get_batch_metrics

Sums = tuple[Tensor, dict[str, Tensor]]
"""The loss, and each metric by its name, summed over images: scalar tensors on the device."""
AUTOCAST_DTYPES = {Precision.bf16.value: torch.bfloat16, Precision.fp16.value: torch.float16}
"""The dtype of `torch.autocast` for each `trainer.precision` that uses it."""


class ModelAndLoss(nn.Module):
    """Preprocessing, model, loss and metrics as one module that can be compiled, captured or wrapped by DDP.

    With `precision=bf16` or `fp16`, the model runs under `torch.autocast`; the weights, the gradients and the loss are
    float32.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, precision: str, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._preprocess = preprocess.forward  # DDP would broadcast the constants of a submodule in each step.
        self._metrics = get_batch_metrics()  # Compiled code cannot access the registry.
        self._device_type = preprocess.mean.device.type
        self._autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Sums:
        """Return the sums over the images of `Batch.tensors()`."""
        labels = inputs["labels"]
        images = self._preprocess(inputs["images"], inputs.get("keys"))
        with torch.autocast(self._device_type, self._autocast_dtype) if self._autocast_dtype else nullcontext():
            logits = self.model(images)
        logits = logits.float()
        loss_sum = self._loss(logits, inputs.get("targets", labels))
        logits = logits.detach()
        return loss_sum, {name: compute(logits, labels) for name, compute in self._metrics.items()}


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
        self._graphs: dict[object, Callable[[dict[str, Tensor]], Sums]] = {}

    def forward(self, inputs: dict[str, Tensor]) -> Sums:
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
