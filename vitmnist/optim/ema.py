"""An average of the weights along the way, which is often better than the last of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """An exponential moving average of a model's weights (Polyak, Juditsky, 1992, doi:10.1137/0330046).

    Each step the average keeps the share `decay` of itself. In the first steps it keeps less, (1 + n) / (10 + n) after
    n of them, or the weights that the run began with would stand in it for long. Buffers are copied, not averaged.

    torch's `AveragedModel` asks the device in each step whether it is the first.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._steps = 0
        self._averages: list[Tensor] = list(self.model.parameters())
        self._newest: list[Tensor] = list(model.parameters())
        self._buffers, self._newest_buffers = list(self.model.buffers()), list(model.buffers())

    def next_weight(self) -> float:
        """What the newest weights count in the step that comes now."""
        self._steps += 1
        return 1 - min(self._decay, self._steps / (9 + self._steps))

    @torch.no_grad()
    def take_in(self, weight: float | Tensor) -> None:
        """Move towards the newest weights.

        Args:
            weight: from `next_weight`; as a tensor on the device where the step is captured and it must vary.
        """
        distances = list(torch._foreach_sub(self._newest, self._averages))
        torch._foreach_mul_(distances, weight)
        torch._foreach_add_(self._averages, distances)
        for buffer, newest in zip(self._buffers, self._newest_buffers, strict=True):
            buffer.copy_(newest)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights, and how many steps they are of."""
        return {"model": self.model.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self._steps = int(state["steps"])
