"""Forward and backward of a batch as CUDA graphs, which a GPU replays without waiting for Python.

With small batches the host needs longer to launch the kernels of a step than the GPU to compute them. A graph launches
all of them at once (`torch.cuda.make_graphed_callables`). Optimizer, schedule, averaged weights and logging stay
outside of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class GraphedModule(nn.Module):
    """Replays the graph that was captured for tensors of these names, shapes and dtypes; without one, calls the module.

    A replay copies its inputs into the captured ones; without the check of shapes and dtypes, torch would broadcast and
    convert them silently. Each replay writes its outputs and gradients to the same memory. The caller must therefore
    copy the outputs, and set the gradients to None before each call.

    Args:
        module: takes and returns a dictionary of tensors; its parameters must stay at their addresses.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[object, Callable[..., Any]] = {}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        call = self._graphs.get(_signature(inputs), self.module)
        outputs: dict[str, Tensor] = call(inputs)
        return outputs

    def capture(self, inputs: dict[str, Tensor]) -> None:
        """Capture forward and backward for inputs of these names, shapes and dtypes.

        No other thread may allocate memory on the GPU meanwhile. Changes the module's buffers, such as the statistics
        of batch normalisation, and the state of the random generators.

        Raises:
            RuntimeError: the module waits for the GPU, or does something else that cannot be captured.
        """
        if _signature(inputs) in self._graphs:
            return
        samples = {name: tensor.clone() for name, tensor in inputs.items()}
        # The graph keeps autograd's nodes alive, and they belong to the stream of the capture.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        make_graphs: Callable[..., Any] = torch.cuda.make_graphed_callables
        # Torch replaces `forward` of the module that it is given, and `self.module` must stay as it is.
        wrapper = nn.Sequential(self.module)
        self._graphs[_signature(inputs)] = make_graphs(wrapper, (samples,), allow_unused_input=True)


def _signature(inputs: dict[str, Tensor]) -> object:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
