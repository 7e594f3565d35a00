"""Augmentation of a whole batch on its device, with random numbers keyed by (seed, epoch, index in the set).

Nothing else changes them: not the loader, the number of workers, or the other images of the batch. Only the partners of
`mixup` and `cutmix` come from the batch.
"""

from vitmnist.data.augment import colour, erasing, geometry, mixing  # register the operations
from vitmnist.data.augment.base import AUGMENTS, OPERATIONS, Augment
from vitmnist.data.augment.compose import Compose
from vitmnist.data.augment.keys import augment_keys

__all__ = ["AUGMENTS", "OPERATIONS", "Augment", "Compose", "augment_keys", "colour", "erasing", "geometry", "mixing"]
