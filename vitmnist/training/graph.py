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

Signature = tuple[object, ...]
"""Shape and dtype of each argument, or None for an argument that is None."""


class GraphedModule(nn.Module):
    """Calls a module by a graph wherever the arguments have the shapes and dtypes of a captured call, else eagerly.

    A replay copies its arguments into the captured ones, which would broadcast and convert others silently. It writes
    outputs and gradients to the same memory as the replay before: the caller copies the outputs, and drops the
    gradients before each call, because a gradient that is accumulated would be overwritten.

    Args:
        module: returns a dictionary of tensors; keeps its parameters where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graphs: dict[Signature, nn.Module] = {}

    def forward(self, *arguments: Tensor | None) -> dict[str, Tensor]:
        graph = self._graphs.get(_signature(arguments))
        if graph is None:
            return self.module(*arguments)  # type: ignore[no-any-return]
        # Each check of a gradient takes 0.1 µs.
        assert all(parameter.grad is None for parameter in self.module.parameters()), "a replay overwrites gradients"
        return graph(*(tensor for tensor in arguments if tensor is not None))  # type: ignore[no-any-return]

    def capture(self, *arguments: Tensor | None) -> None:
        """Capture forward and backward for arguments like these; no other thread may allocate on the GPU meanwhile.

        Moves buffers such as the statistics of batch normalisation, and random generators.

        Raises:
            RuntimeError: the module waits for the GPU, or does something else that no graph can hold.
        """
        if (signature := _signature(arguments)) in self._graphs:
            return
        samples = tuple(tensor.clone() for tensor in arguments if tensor is not None)
        call = _TensorsOnly(self.module, [tensor is not None for tensor in arguments])
        # The graph keeps autograd's nodes, which belong to the stream of the capture, for as long as it lives.
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
        return self.module(*(next(remaining) if is_tensor else None for is_tensor in self._is_tensor))  # type: ignore[no-any-return]


def _signature(arguments: tuple[Tensor | None, ...]) -> Signature:
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in arguments)
