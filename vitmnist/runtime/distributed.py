"""The processes ("ranks") of one run: `SingleProcess` here, and `TorchDistributed` for several with the same methods.

This module imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class SingleProcess:
    """The only process of a run. Objects that are exchanged must be JSON-serialisable."""

    rank = 0
    size = 1
    local_rank = 0
    local_world_size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records."""
        return self.rank == 0

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, where alone it is called."""
        return make()

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks."""
        return [value]

    def publish(self, key: str, value: Any) -> Any:
        """Store a value for other ranks unless the key is taken; returns the value that is stored."""
        return value

    def wait_for(self, key: str) -> Any:
        """The value that a rank has published, as soon as there is one."""
        raise LookupError(key)

    @contextmanager
    def first_on_machine(self) -> Iterator[bool]:
        """Run the block on one rank of each machine, then on its others; yields whether this is one of the others."""
        yield False

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Open the process group; needed for tensors. A rank waits at most `timeout_s` for another."""

    def broadcast_tensors(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What `make` returns on rank 0, where alone it is called: plain values and CPU tensors."""
        return make()

    def all_gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The CPU tensors of all ranks, of the same shape and dtype, in the order of the ranks."""
        return [tensor]

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

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """The module such that a backward pass averages the gradients over the ranks."""
        return module

    def report_failure(self, reason: str) -> bool:
        """Publish why this rank fails; returns whether it is the first to fail."""
        return True

    def root_cause(self, error: BaseException) -> BaseException:
        """`error`, or a `PeerError` if it only follows from the failure of another rank."""
        return error

    def disconnect(self) -> None:
        """Close the process group after success. After a failure it would wait for the rank that failed."""


SINGLE_PROCESS = SingleProcess()


def launched() -> bool:
    """Whether `torchrun`, or whatever sets the same environment variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
