"""What a model may tell about its parameters, mostly in timm's convention."""

import re
from collections.abc import Callable, Collection
from typing import Any

from torch import nn


def names_without_decay(model: nn.Module) -> Collection[str]:
    """Return the names of parameters without weight decay: `no_weight_decay` of the model, a collection or a method."""
    names: Collection[str] | Callable[[], Collection[str]] = getattr(model, "no_weight_decay", ())
    return names() if callable(names) else names


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
