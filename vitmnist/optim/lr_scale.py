"""`lr_scale`: other learning rates for the parameters that patterns fit, and none for those that are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from vitmnist.errors import ConfigError, listed

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def scale_learning_rates(optimizer: Optimizer, model: nn.Module, factors: Mapping[str, float]) -> list[nn.Module]:
    """Multiply the learning rates of an optimizer that has done no step, and freeze the parameters of factor 0.

    The optimizer's groups are divided, so that their other options, such as weight decay, stay as they are.

    Args:
        factors: by pattern of the parameters' names; the last one that fits counts, and without one 1.

    Returns:
        The batch normalisations that are frozen, whose statistics must not move either.

    Raises:
        ConfigError: a pattern fits no parameter, or all are frozen.
    """
    if not factors:
        return []
    names = {parameter: name for name, parameter in model.named_parameters()}
    for pattern in factors:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ConfigError(
                f"lr_scale: {pattern!r} fits no parameter; those of the model are {listed(names.values())}"
            )

    def factor_of(name: str) -> float:
        return next((one for pattern, one in reversed([*factors.items()]) if fnmatchcase(name, pattern)), 1.0)

    def is_frozen(name: str, norm: nn.Module) -> bool:
        own = [one for one, _ in norm.named_parameters()] or ["running_mean"]  # without parameters, by its statistics
        return not any(factor_of(f"{name}.{one}") for one in own)

    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factor_of(names[parameter]), []).append(parameter)
        groups += [
            {**group, "params": parameters, "lr": factor * group["lr"]}
            for factor, parameters in by_factor.items()
            if factor
        ]
    if not groups:
        raise ConfigError(f"lr_scale={dict(factors)}: freezes all parameters; leave some of them to train")
    optimizer.param_groups[:] = groups
    for parameter, name in names.items():
        if not factor_of(name):
            parameter.requires_grad_(False)
    return [
        module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS) and is_frozen(name, module)
    ]
