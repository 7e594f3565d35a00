"""The processes ("ranks") of a run: `SingleProcess`, or `TorchWorld` in `torch_world.py` for several.

This module imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Value = TypeVar("Value")


class World(ABC):
    """The ranks of a run, from the view of one of them. Objects that are exchanged are plain values and CPU tensors."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records."""
        return self.rank == 0

    @abstractmethod
    def broadcast_object(self, make: Callable[[], Value], source: int = 0) -> Value:
        """What `make` returns on rank `source`; the other ranks do not call it."""

    def all_gather_object(self, value: Value) -> list[Value]:
        """The values of all ranks, in the order of the ranks."""
        return [self.broadcast_object(lambda: value, source) for source in range(self.size)]

    @abstractmethod
    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Prepare for training on `device`: from now on a rank waits at most `timeout_s` for another."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather_object(None)

    @abstractmethod
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks."""

    @abstractmethod
    def all_reduce_max(self, values: Sequence[int], at_once: bool = False) -> list[int]:
        """The maximum over all ranks, item by item.

        Across ranks it is asynchronous: a call returns the maxima of the call before, unless `at_once`.
        """

    @abstractmethod
    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch normalisation."""

    @abstractmethod
    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """Wrap `module` so that its backward pass averages the gradients over the ranks."""

    @abstractmethod
    def first_failure(self, error: BaseException) -> BaseException:
        """`error`, or a `PeerError` with the message of the rank that failed before this one."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the connections after success. After a failure it would wait for the rank that failed."""


class SingleProcess(World):
    """The only process of a run."""

    rank, size, local_rank = 0, 1, 0

    def broadcast_object(self, make: Callable[[], Value], source: int = 0) -> Value:
        return make()

    def connect(self, device: torch.device, timeout_s: float) -> None: ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_max(self, values: Sequence[int], at_once: bool = False) -> list[int]:
        return list(values)

    def broadcast_buffers(self, module: nn.Module) -> None: ...

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        return module

    def first_failure(self, error: BaseException) -> BaseException:
        return error

    def disconnect(self) -> None: ...


SINGLE_PROCESS = SingleProcess()


def launched() -> bool:
    """Whether `torchrun`, or a launcher that sets the same environment variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
