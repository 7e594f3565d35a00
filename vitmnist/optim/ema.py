"""An exponential moving average of a model's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Averages the weights over the training steps (Polyak, Juditsky, 1992, doi:10.1137/0330046).

    A step keeps the share `decay` of the average, but at most (1 + n) / (10 + n) of it after n steps; otherwise the
    initial weights would dominate for long. Buffers are copied.

    Not torch's `AveragedModel`, which waits for the device in each step to ask whether it is the first.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._source, self._decay, self._steps = model, decay, 0
        self._averages: list[Tensor] = list(self.model.parameters())
        self._weights: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the current weights, after each step."""
        self._steps += 1
        keep = min(self._decay, self._steps / (9 + self._steps))
        distances = list(torch._foreach_sub(self._weights, self._averages))
        torch._foreach_mul_(distances, 1 - keep)
        torch._foreach_add_(self._averages, distances)
        for average, buffer in zip(self.model.buffers(), self._source.buffers(), strict=True):
            average.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the number of updates."""
        return {"model": self.model.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self._steps = int(state["steps"])
