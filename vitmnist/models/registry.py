"""The registry of the models."""

from torch import nn

from vitmnist.registry import Registry

MODELS: Registry[nn.Module] = Registry("model")
