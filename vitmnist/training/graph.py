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
    """Replays the graph that was captured for arguments of these shapes and dtypes; without one, calls the module.

    A replay copies its arguments into the captured ones; without the check of shapes and dtypes, torch would broadcast
    and convert them silently. Each replay writes its outputs and gradients to the same memory. The caller
    must therefore copy the outputs, and set the gradients to None before each call.

    Args:
        module: returns a dictionary of tensors; its parameters must stay at their addresses.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[object, Callable[..., dict[str, Tensor]]] = {}
        """The graphs by the shapes and dtypes of their arguments."""

    def forward(self, *arguments: Tensor | None) -> dict[str, Tensor]:
        if graph := self._graphs.get(_signature(arguments)):
            return graph(*(tensor for tensor in arguments if tensor is not None))
        outputs: dict[str, Tensor] = self.module(*arguments)
        return outputs

    def capture(self, *arguments: Tensor | None) -> None:
        """Capture forward and backward for arguments of these shapes and dtypes.

        No other thread may allocate memory on the GPU meanwhile. Changes the module's buffers, such as the statistics
        of batch normalisation, and the state of the random generators.

        Raises:
            RuntimeError: the module waits for the GPU, or does something else that cannot be captured.
        """
        if (signature := _signature(arguments)) in self._graphs:
            return
        samples = tuple(tensor.clone() for tensor in arguments if tensor is not None)
        call = _TensorsOnly(self.module, [tensor is not None for tensor in arguments])
        # The graph keeps autograd's nodes alive, and they belong to the stream of the capture.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        make_graphs: Callable[..., Any] = torch.cuda.make_graphed_callables
        self._graphs[signature] = make_graphs(call, samples, allow_unused_input=True)


class _TensorsOnly(nn.Module):
    """Calls a module without its None arguments, which a graph does not take."""

    def __init__(self, module: nn.Module, is_tensor: list[bool]) -> None:
        super().__init__()
        self.module, self._is_tensor = module, is_tensor

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        remaining = iter(tensors)
        outputs: dict[str, Tensor] = self.module(
            *(next(remaining) if is_tensor else None for is_tensor in self._is_tensor)
        )
        return outputs


def _signature(arguments: tuple[Tensor | None, ...]) -> object:
    """Shape and dtype of each argument, or None for an argument that is None."""
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in arguments)
