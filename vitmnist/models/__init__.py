"""The models: every module in this folder registers one, built with (options, image shape, number of classes)."""

from importlib import import_module
from pkgutil import iter_modules

from vitmnist.models.registry import MODELS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["MODELS"]
