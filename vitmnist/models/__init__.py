"""The registry of models. Each module in this folder registers a model, built with (options, image shape, classes)."""

from torch import nn

from vitmnist.registry import Registry

MODELS: Registry[nn.Module] = Registry("model", __package__)
