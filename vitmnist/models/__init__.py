"""The models: every module in this folder registers one, built with (options, image shape, number of classes)."""

from torch import nn

from vitmnist.registry import Registry, import_members

__all__ = ["MODELS"]

MODELS: Registry[nn.Module] = Registry("model")

import_members(__name__, __path__)
