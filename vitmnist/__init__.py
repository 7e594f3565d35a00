"""A reference training framework for image classification. All loaders deliver identical batches.

from vitmnist import load_dataset, make_loader

train = load_dataset("mnist").train
with make_loader("ram", train, batch_size=500, device="auto", seed=0) as loader:
    for images, labels in loader.epoch(0):
        ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitmnist.auditing import audit as audit
    from vitmnist.augment.preprocess import Preprocess as Preprocess
    from vitmnist.cli.train_function import train as train
    from vitmnist.data.datasets.base import load_dataset as load_dataset
    from vitmnist.diagnosis.measure import diagnose as diagnose
    from vitmnist.inference.trained_model import load_model as load_model
    from vitmnist.loaders.base import Loader as Loader
    from vitmnist.loaders.base import register as register
    from vitmnist.loaders.make_loader import make_loader as make_loader
    from vitmnist.replacement.from_dataloader import from_dataloader as from_dataloader

__version__ = "0.3.0"
# The module of each public name. Modules are imported at first use, so that `vitmnist --help` does not import torch.
_MODULES = {
    "Loader": "vitmnist.loaders.base",
    "Preprocess": "vitmnist.augment.preprocess",
    "audit": "vitmnist.auditing",
    "diagnose": "vitmnist.diagnosis.measure",
    "from_dataloader": "vitmnist.replacement.from_dataloader",
    "load_dataset": "vitmnist.data.datasets.base",
    "load_model": "vitmnist.inference.trained_model",
    "make_loader": "vitmnist.loaders.make_loader",
    "register": "vitmnist.loaders.base",
    "train": "vitmnist.cli.train_function",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which tab completion shows."""
    return [*__all__, "__version__"]
