"""The processes ("ranks") of one run: `World` is a single process, `TorchWorld` several, with the same methods.

This module imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Value = TypeVar("Value")


class World:
    """The only process of a run. Objects that are exchanged are plain values and CPU tensors."""

    rank = 0
    size = 1
    local_rank = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records."""
        return self.rank == 0

    def broadcast_object(self, make: Callable[[], Value]) -> Value:
        """What `make` returns on rank 0; the other ranks do not call it."""
        return make()

    def all_gather_object(self, value: Value) -> list[Value]:
        """The values of all ranks, in the order of the ranks."""
        return [value]

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Prepare for training on `device`: from now on a rank waits at most `timeout_s` for another."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks."""
        return tensor

    def all_reduce_max(self, values: Sequence[int], at_once: bool = False) -> list[int]:
        """The maximum over all ranks, item by item.

        Across ranks it is asynchronous: a call returns the maxima of the call before, unless `at_once`.
        """
        return list(values)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch normalisation."""

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """Wrap `module` so that its backward pass averages the gradients over the ranks."""
        return module

    def first_failure(self, error: BaseException) -> BaseException:
        """`error`, or a `PeerError` with the message of the rank that failed before this one."""
        return error

    def disconnect(self) -> None:
        """Close the connections after success. After a failure it would wait for the rank that failed."""


SINGLE_PROCESS = World()


def launched() -> bool:
    """Whether `torchrun`, or a launcher that sets the same environment variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
