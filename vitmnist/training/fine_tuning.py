"""Fine-tuning: initial weights (`init`), and learning rates by parameter (`lr_scale`, `optimizer.layer_decay`)."""

import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vitmnist.errors import ConfigError, join_names
from vitmnist.models.pretrained import fit_weights

log = logging.getLogger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose output depends on the whole batch in training mode."""
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
"""Prefixes that DataParallel, `torch.compile`, Lightning and other wrappers add to the names of weights."""


def load_pretrained(model: nn.Module, weights: Mapping[str, Tensor], skip: Sequence[str], num_classes: int) -> None:
    """Load the weights of `model.weights`, fitted to the images and classes; raises `ConfigError` as `init` does."""
    fitted, head = fit_weights({**_rename_weights(weights, model)}, model, num_classes)
    load_matching_weights(model, fitted, [*skip, *head], "model.weights")


def load_matching_weights(
    model: nn.Module, weights: Mapping[str, Tensor], skip: Sequence[str], key: str = "init"
) -> None:
    """Load weights and buffers by name. `_rename_weights` first adapts the names to the model.

    Args:
        skip: patterns of the names that may be missing or differ in shape. The model keeps its initial values for them.

    Raises:
        ConfigError: names or shapes differ, a pattern matches no name, or no weights are left.
    """
    state = model.state_dict()
    weights = _rename_weights(weights, model)
    names = state.keys() | weights.keys()
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"init_skip: {pattern!r} fits no weight; the model has {join_names(state)}")
    fitting = {name: value for name, value in weights.items() if name in state and value.shape == state[name].shape}
    differing = [
        f"{name} ({_format_shape(weights, name)} in {key}, {_format_shape(state, name)} in the model)"
        for name in sorted(names - fitting.keys())
        if not any(fnmatchcase(name, pattern) for pattern in skip)
    ]
    if differing:
        raise ConfigError(
            f"{key}: the weights do not fit this model: {join_names(differing)}; set what may differ as "
            "init_skip='[NAME,PATTERN.*]', or name other weights"
        )
    if not fitting:
        raise ConfigError(f"init_skip={[*skip]}: leaves nothing of {key}; set {key}=null, or name other weights")
    model.load_state_dict(fitting, strict=False)
    log.info("started from %d of %d weights of %s; the model has %d", len(fitting), len(weights), key, len(state))


def _rename_weights(weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Rename weights to match the names in a model.

    Prefixes of wrappers are removed until a name matches. If none ever does, the weights belong to a child of
    the model, such as `backbone`.
    """
    names = model.state_dict().keys()
    while not names & weights.keys():
        prefix = next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in weights)), None)
        if prefix is None:
            children = [f"{name}." for name, _ in model.named_children()]
            parent = next((child for child in children if any(child + name in names for name in weights)), "")
            return {parent + name: value for name, value in weights.items()}
        log.info("the prefix %s is removed from the names of the weights", prefix)
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _format_shape(weights: Mapping[str, Tensor], name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "missing"


def find_layers(model: Any) -> dict[str, int]:
    """Return the layer of each parameter, from 0 at the input to the head; empty for a model without ordered blocks.

    Models of timm have a method `group_matcher`. In others, the regular expression `layer_pattern` matches the names of
    the parameters of a block, which are in the order of the forward pass.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        return dict(group_parameters(model, model.group_matcher(coarse=False), reverse=True))
    layers, blocks = {}, ["stem"]
    for name, _ in model.named_parameters():
        match = re.match(getattr(model, "layer_pattern", "$"), name)
        block = match[0] if match else "stem" if len(blocks) == 1 else "head"
        if block not in blocks:
            blocks.append(block)
        layers[name] = blocks.index(block)
    return layers if len(blocks) > 1 else {}


def scale_learning_rates(
    optimizer: Optimizer, model: nn.Module, factors: Mapping[str, float], layer_decay: float | None = None
) -> list[nn.Module]:
    """Scale the learning rates of a new optimizer by parameter, and freeze the parameters with factor 0.

    Parameter groups are split by factor. They keep their other options, such as weight decay.

    Args:
        factors: the factor for each pattern of parameter names. The last matching pattern wins; the default is 1.
        layer_decay: multiplies the factor of each layer once for every layer that follows it.

    Returns:
        The frozen batch normalisations. Their running statistics must not change either.

    Raises:
        ConfigError: a pattern matches no parameter, all are frozen, or `layer_decay` finds no ordered blocks.
    """
    if not factors and layer_decay is None:
        return []
    layers = find_layers(model) if layer_decay is not None else {}
    if layer_decay is not None and not layers:
        raise ConfigError(
            f"optimizer.layer_decay={layer_decay}: the model has no ordered blocks; set it to null, or use lr_scale"
        )
    head = max(layers.values(), default=0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for pattern in factors:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ConfigError(f"lr_scale: {pattern!r} fits no parameter; the model has {join_names(names.values())}")

    def find_factor(name: str) -> float:
        return next((factor for pattern, factor in reversed([*factors.items()]) if fnmatchcase(name, pattern)), 1.0)

    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            if factor := find_factor(name) * (layer_decay or 1) ** (head - layers.get(name, head)):
                scaled = {**group, "params": [], "lr": factor * group["lr"]}
                groups.setdefault((index, factor), scaled)["params"].append(parameter)
            else:
                parameter.requires_grad_(False)
                optimizer.state.pop(parameter, None)  # Some optimizers, such as Adagrad, fill their state at once.
    if not groups:
        raise ConfigError(f"lr_scale={dict(factors)}: freezes all parameters; leave some of them to train")
    optimizer.param_groups[:] = groups.values()
    norms = {name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    return [norm for name, norm in norms.items() if not (find_factor(f"{name}.weight") or find_factor(f"{name}.bias"))]
