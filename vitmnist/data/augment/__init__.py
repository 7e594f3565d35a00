"""Augmentation of a whole batch on its device, with random numbers keyed by (seed, epoch, index in the set).

Nothing else affects these numbers: not the loader, the number of workers, or the other images of the batch. Only the
partners of `mixup` and `cutmix` depend on the batch. Every module in this folder that registers an operation is
imported here.
"""

from vitmnist.data.augment.base import OPERATIONS, Mixing, Operation
from vitmnist.data.augment.compose import Compose, build_augment
from vitmnist.data.augment.keys import augment_keys
from vitmnist.registry import import_members

__all__ = ["OPERATIONS", "Compose", "Mixing", "Operation", "augment_keys", "build_augment"]

import_members(__name__, __path__)
