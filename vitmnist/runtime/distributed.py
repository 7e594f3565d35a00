"""The processes ("ranks") that train one run together, and the few things that they have to agree on.

`torchrun` starts them and tells each by the environment which one it is. A process alone is a `World` too, in which
nothing has to be agreed on; `vitmnist/ranks.py` has the other, and is the one place that knows `torch.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # --help answers before torch is imported
    import torch
    from torch import Tensor, nn


class SingleProcess:
    """This process alone, with which nobody has to agree."""

    rank = 0
    size = 1
    local_rank = 0
    local_world_size = 1
    """How many of the ranks are on this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that keeps the records."""
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; plain values."""
        return [value]

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes; plain values."""
        return make()

    def tell(self, key: str, value: Any) -> None:
        """Let the others know a plain value by a name."""

    def ask(self, key: str) -> Any:
        """Wait until one of the ranks has told a value, and return it."""
        raise LookupError(key)

    @contextmanager
    def first_on_machine(self) -> Iterator[bool]:
        """Let one rank of each machine do what follows before the others of it; tells whether one has done it."""
        yield False

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Connect the ranks; from now on tensors can be added up.

        Args:
            timeout_s: how long one waits for another at most.
        """

    def broadcast_tensors(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What rank 0 makes; plain values and CPU tensors."""
        return make()

    def all_gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """What each rank gives, by rank; CPU tensors of the same shape and dtype."""
        return [tensor]

    def barrier(self) -> None:
        """Go on when all ranks have come here."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Give `tensor` the sum over all ranks; all must call it, in the same order."""
        return tensor

    def all_reduce_max(self, votes: Sequence[int], at_once: bool = False) -> list[int]:
        """The largest of what any rank has voted for, item by item; all must call it equally often.

        With several ranks the votes are under way while the next batch is computed, and are counted at the next call,
        unless it is to be `at_once`.
        """
        return list(votes)

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        """The module so that each backward pass leaves the mean of the ranks' gradients."""
        return module

    def report_failure(self, reason: str) -> bool:
        """Whether no other rank has failed before; the others hear the reason."""
        return True

    def root_cause(self, error: BaseException) -> BaseException:
        """The error, or that of the rank whose failure it is the consequence of."""
        return error

    def disconnect(self) -> None:
        """Disconnect, when all ranks have come to their end. After a failure the end of the process does it: to
        disconnect would be to wait for whoever has failed."""


ALONE = SingleProcess()


def launched() -> bool:
    """Whether `torchrun`, or what sets the same environment, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
