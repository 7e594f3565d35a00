"""The registry of models. Each module in this folder registers a model, built with (options, image shape, classes)."""

from torch import nn

from vitmnist.registry import GroupRegistry

MODELS: GroupRegistry[nn.Module] = GroupRegistry("model", __package__)
