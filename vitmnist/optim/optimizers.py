"""The optimizers, built with (options, model, fused).

A fused optimizer updates all weights of a group with one kernel. The result differs by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitmnist.config.validation import bounded
from vitmnist.errors import ConfigError
from vitmnist.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", __package__)


@dataclass
class AdamOptions:
    """See `conf/optimizer/adam.yaml`."""

    lr: float = bounded(0.003, above=0)
    beta1: float = bounded(0.9, at_least=0, below=1)
    beta2: float = bounded(0.999, at_least=0, below=1)
    eps: float = bounded(1e-8, above=0)
    weight_decay: float = bounded(0.0, at_least=0)


@dataclass
class SGDOptions:
    """See `conf/optimizer/sgd.yaml`."""

    lr: float = bounded(0.1, above=0)
    momentum: float = bounded(0.9, at_least=0, below=1)
    nesterov: bool = False
    weight_decay: float = bounded(0.0, at_least=0)


@OPTIMIZERS.register("adam", AdamOptions)
def adam(options: AdamOptions, model: nn.Module, fused: bool) -> Optimizer:
    """Adam (Kingma, Ba, arXiv:1412.6980); weight decay is an L2 penalty on all parameters, added to the gradient."""
    return torch.optim.Adam(model.parameters(), **_adam_arguments(options, fused))


@OPTIMIZERS.register("adamw", AdamOptions)
def adamw(options: AdamOptions, model: nn.Module, fused: bool) -> Optimizer:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101); weight decay shrinks the weights of `decay_groups` directly."""
    return torch.optim.AdamW(decay_groups(model), **_adam_arguments(options, fused))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: with weight decay, and without.

    Exempt are parameters with fewer than two dimensions (biases, norm weights) and those named in the model's
    `no_weight_decay`, as in timm's `param_groups_weight_decay`.
    """
    named = getattr(model, "no_weight_decay", ())
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (exempt if parameter.ndim < 2 or name in named else decayed).append(parameter)
    return [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]


def _adam_arguments(options: AdamOptions, fused: bool) -> dict[str, Any]:
    return {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": fused or None,  # False would also disable torch's foreach implementation
    }


@OPTIMIZERS.register("sgd", SGDOptions)
def sgd(options: SGDOptions, model: nn.Module, fused: bool) -> Optimizer:
    """Stochastic gradient descent with momentum; weight decay is an L2 penalty on all parameters.

    Raises:
        ConfigError: Nesterov momentum without momentum.
    """
    if options.nesterov and not options.momentum:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum above 0")
    return torch.optim.SGD(
        model.parameters(),
        options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        fused=fused or None,
    )
