"""The optimizers, built with (options, parameters, fused): whether one call changes all weights.

What is fused differs from what is not by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitmnist.config import bounded
from vitmnist.errors import ConfigError
from vitmnist.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")


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
def adam(options: AdamOptions, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    """Adam (Kingma, Ba, arXiv:1412.6980); weight decay is an L2 penalty in the gradient."""
    return torch.optim.Adam(parameters, **_adam_arguments(options, fused))


@OPTIMIZERS.register("adamw", AdamOptions)
def adamw(options: AdamOptions, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101); weight decay shrinks the weights directly."""
    return torch.optim.AdamW(parameters, **_adam_arguments(options, fused))


def _adam_arguments(options: AdamOptions, fused: bool) -> dict[str, Any]:
    return {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": fused or None,  # False would also forbid torch its own choice
    }


@OPTIMIZERS.register("sgd", SGDOptions)
def sgd(options: SGDOptions, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    """Stochastic gradient descent with momentum.

    Raises:
        ConfigError: Nesterov's form without momentum.
    """
    if options.nesterov and not options.momentum:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum above 0")
    return torch.optim.SGD(
        parameters,
        options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        fused=fused or None,
    )
