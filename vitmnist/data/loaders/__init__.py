"""The loaders: every module in this folder registers one, and each delivers the very same batches.

To add a loader, write a module here that registers a subclass of `Loader`, and its YAML file in `conf/data/loader/`.
"""

from importlib import import_module
from pkgutil import iter_modules

from vitmnist.data.loaders.contract import LOADERS, Batch, Loader

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["LOADERS", "Batch", "Loader"]
