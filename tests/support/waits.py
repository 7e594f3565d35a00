"""A GPU in torch's own simulation, without values, on which whatever the host would wait for is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)


class NoCopies(TorchDispatchMode):
    """Refuses copies between host and device: those of pageable memory wait for all work that is queued."""

    is_on = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if self.is_on and function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            kinds = {one.device.type for one in tree_leaves([args, found]) if isinstance(one, torch.Tensor)}
            assert len(kinds) == 1, "a copy between host and device"
        return found

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow them within the block, in which new tensors are on the device."""
        self.is_on = False
        with CUDA:
            yield
        self.is_on = True


@contextmanager
def refusing_waits() -> Iterator[NoCopies]:
    """Within the block, tensors have no values: one that is read raises by itself."""
    with FakeTensorMode(allow_non_fake_inputs=True), NoCopies() as copies:
        yield copies
