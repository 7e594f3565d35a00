"""The processes ("ranks") of a run: `World` for a single process, `TorchWorld` in `torch_world.py` for several.

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
    """A run's ranks as one rank sees them; this base class stands for a single process."""

    rank = 0
    size = 1
    local_rank = 0  # The number of this rank on its machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records."""
        return self.rank == 0

    def broadcast_object(self, make: Callable[[], Value], source: int = 0) -> Value:
        """Call `make` on one rank, and return its result, of plain values and CPU tensors, on all ranks."""
        return make()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in the order of the ranks."""
        return [self.broadcast_object(lambda: value, source) for source in range(self.size)]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather_object(None)

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Prepare for training on `device`: from now on a rank waits at most `timeout_s` for another."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks."""
        return tensor

    def max_over_ranks(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks at each position of `values`."""
        return list(values)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch normalisation."""

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """Wrap `module` so that its backward pass averages the gradients over the ranks."""
        return module

    def find_first_failure(self, error: BaseException) -> BaseException:
        """Return `error`, or a `PeerError` with the message of the rank that failed before this one."""
        return error

    def disconnect(self) -> None:
        """Close the connections after success. After a failure, closing would wait for the rank that failed."""


SINGLE_PROCESS = World()


def is_distributed() -> bool:
    """Whether `torchrun`, or a launcher that sets the same environment variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
