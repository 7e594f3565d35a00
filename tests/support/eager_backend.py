"""A device with its own memory, which is host memory, that does everything at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vitmnist.runtime.backend import CpuBackend

DEVICE = torch.device("privateuseone")


class EagerBackend(CpuBackend):
    """Copies batches as for a GPU, so that what a loader does there is tested with the tensors themselves."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copied_nbytes = 0

    def use_stream(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def to_device(self, tensor: Tensor) -> Tensor:
        self.copied_nbytes += tensor.nbytes
        return tensor.clone()
