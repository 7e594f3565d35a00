"""The optimizers, built with (options, model, fused), and the moving average of the weights.

A fused optimizer updates all weights of a group with one kernel; its results differ only by rounding. Otherwise, torch
receives `fused=None`, because `fused=False` would also disable its foreach implementation.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError
from vitmnist.registry import ConfigGroup


@dataclass
class OptimizerOptions:
    """Base class of the options of an optimizer: what `scale_learning_rates` does with any of them."""

    layer_decay: float | None = config_field(None, above=0, at_most=1)


OPTIMIZERS = ConfigGroup[OptimizerOptions, [nn.Module, bool], Optimizer]("optimizer", __package__, OptimizerOptions)


@dataclass
class AdamOptions(OptimizerOptions):
    """See `conf/optimizer/adam.yaml`."""

    lr: float = config_field(0.003, above=0)
    beta1: float = config_field(0.9, at_least=0, below=1)
    beta2: float = config_field(0.999, at_least=0, below=1)
    eps: float = config_field(1e-8, above=0)
    weight_decay: float = config_field(0.0, at_least=0)

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of torch's optimizers."""
        betas = self.beta1, self.beta2
        return {"lr": self.lr, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass
class SGDOptions(OptimizerOptions):
    """See `conf/optimizer/sgd.yaml`."""

    lr: float = config_field(0.1, above=0)
    momentum: float = config_field(0.9, at_least=0, below=1)
    nesterov: bool = False
    weight_decay: float = config_field(0.0, at_least=0)
    decay_norms: bool = True


@OPTIMIZERS.register("adam", AdamOptions)
def adam(options: AdamOptions, model: nn.Module, fused: bool) -> Optimizer:
    """Adam (Kingma, Ba, arXiv:1412.6980); weight decay is an L2 penalty on all parameters, added to the gradient."""
    return torch.optim.Adam(model.parameters(), **options.arguments(), fused=fused or None)


@OPTIMIZERS.register("adamw", AdamOptions)
def adamw(options: AdamOptions, model: nn.Module, fused: bool) -> Optimizer:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101); weight decay shrinks weights directly; see `make_decay_groups`."""
    return torch.optim.AdamW(make_decay_groups(model), **options.arguments(), fused=fused or None)


def make_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: with and without weight decay.

    As in timm's `param_groups_weight_decay`, parameters with fewer than two dimensions (biases, norm weights) have no
    weight decay. The same holds for the parameters that `no_weight_decay` of the model names, a collection or a method.
    """
    no_decay: Any = getattr(model, "no_weight_decay", ())
    no_decay = no_decay() if callable(no_decay) else no_decay
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (exempt if parameter.ndim < 2 or name in no_decay else decayed).append(parameter)
    return [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]


@OPTIMIZERS.register("sgd", SGDOptions)
def sgd(options: SGDOptions, model: nn.Module, fused: bool) -> Optimizer:
    """Stochastic gradient descent with momentum; weight decay is an L2 penalty.

    Without `decay_norms`, some parameters have no weight decay; see `make_decay_groups`.
    """
    if options.nesterov and not options.momentum:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum above 0")
    parameters = model.parameters() if options.decay_norms else make_decay_groups(model)
    arguments = {name: getattr(options, name) for name in ("lr", "momentum", "nesterov", "weight_decay")}
    return torch.optim.SGD(parameters, **arguments, fused=fused or None)


class EMA:
    """An exponential moving average of the weights (Polyak, Juditsky, 1992, doi:10.1137/0330046).

    In update n, counted from 1, the decay is at most n / (9 + n), so that the initial weights do not dominate for long.
    Buffers are copied. Unlike torch's `AveragedModel`, an update does not wait for the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._source = model
        self._decay = decay
        self._updates = 0
        self._averages: list[Tensor] = list(self.model.parameters())
        self._weights: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights; called after each step."""
        self._updates += 1
        decay = min(self._decay, self._updates / (9 + self._updates))
        distances = list(torch._foreach_sub(self._weights, self._averages))
        torch._foreach_mul_(distances, 1 - decay)
        torch._foreach_add_(self._averages, distances)
        if buffers := list(self.model.buffers()):
            torch._foreach_copy_(buffers, list(self._source.buffers()))

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights and the number of updates."""
        return {"model": self.model.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self._updates = int(state["updates"])
