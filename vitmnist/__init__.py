"""How to feed a GPU from PyTorch: loaders that deliver the very same batches, and the trainer that compares them.

from vitmnist import load_dataset, make_loader

train = load_dataset("mnist").train
with make_loader("ram", train, batch_size=500, device="auto", seed=0) as loader:
    for images, labels in loader.epoch(0):
        ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitmnist.data.datasets import load_dataset
    from vitmnist.data.from_dataloader import from_dataloader
    from vitmnist.data.loaders import Loader, make_loader, register
    from vitmnist.data.preprocess import Preprocess
    from vitmnist.diagnosis.audit import audit
    from vitmnist.diagnosis.measure import diagnose
    from vitmnist.runtime.allocator import keep_memory

__version__ = "0.1.0"
__all__ = [
    "Loader",
    "Preprocess",
    "audit",
    "diagnose",
    "from_dataloader",
    "keep_memory",
    "load_dataset",
    "make_loader",
    "register",
]

# Imported only when asked for: they need torch, and `vitmnist --help` is to answer at once.
_HOMES = {
    "Loader": "vitmnist.data.loaders.base",
    "Preprocess": "vitmnist.data.preprocess",
    "audit": "vitmnist.diagnosis.audit",
    "diagnose": "vitmnist.diagnosis.measure",
    "from_dataloader": "vitmnist.data.from_dataloader",
    "keep_memory": "vitmnist.runtime.allocator",
    "load_dataset": "vitmnist.data.datasets",
    "make_loader": "vitmnist.data.loaders",
    "register": "vitmnist.data.loaders.base",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
