"""Applies the last transforms of a dataset to whole batches, or to each picture in its row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import FetchedBatch
from vitmnist.replacement.drawn_transforms import DrawnSamples
from vitmnist.replacement.split_transforms import Transform, apply
from vitmnist.store.tree import find_difference, flatten, named_leaves, unflatten

BATCH_DIMS = 4
"""Dimensions of a batch of pictures, [B, C, H, W]."""
VALUES_AT_A_TIME = 2**19
"""Number of values that are transformed at a time on the CPU: they fit into its cache."""


@dataclass(frozen=True)
class DeferredTransforms:
    """Applies transforms to some of the tensors of a batch, by their paths in it, such as `['image']`."""

    paths: frozenset[str]
    transforms: Sequence[Transform]

    def __call__(self, batch: Any) -> Any:
        values = [self._finished(leaf) if path in self.paths else leaf for path, leaf in named_leaves(batch)]
        return unflatten(values, flatten(batch)[1])

    def _finished(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return apply(self.transforms, (images,))[0]  # type: ignore[no-any-return]
        finished, filled = images, 0
        for part in images.split(max(1, VALUES_AT_A_TIME * len(images) // max(1, images.numel()))):
            (result,) = apply(self.transforms, (part,))
            if not filled:
                finished = result.new_empty((len(images), *result.shape[1:]))
            finished[filled : filled + len(part)] = result
            filled += len(part)
        return finished


@dataclass(frozen=True)
class DeferredCollate:
    """A collate function that applies the last transforms of the samples to the whole batch.

    Args:
        dataset: whose samples lack their last transforms; others are only collated.
    """

    collate: Callable[[Any], Any]
    finish: DeferredTransforms
    dataset: Any

    def unfinished(self, samples: Any) -> Any:
        """The batch without the last transforms."""
        return self.collate(samples.content)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, FetchedBatch):
            return self.collate(samples)
        worker = get_worker_info()
        if not worker and isinstance(samples, DrawnSamples) and self.collate is default_collate:
            return samples.finished(self.finish.transforms)
        batch = self.unfinished(samples)
        # With another dataset, such as a Subset, code in the worker may use the batch.
        return DeferredBatch(batch, self.finish) if worker and worker.dataset is self.dataset else self.finish(batch)


@dataclass(frozen=True)
class DeferredBatch:
    """A batch that is finished when it is unpickled, so that only a quarter of the bytes leave the worker."""

    batch: Any
    finish: DeferredTransforms

    def __reduce__(self) -> tuple[DeferredTransforms, tuple[Any]]:
        return self.finish, (self.batch,)


def make_deferred(
    trailing: Sequence[Transform], batch: Any, finished: Any, exact: Any, of_tensors: bool
) -> DeferredTransforms:
    """The `DeferredTransforms` that applies the trailing transforms to a batch of samples without them.

    Args:
        batch: of samples without the trailing transforms.
        finished: of samples with them.
        exact: the original's batch; the result must have its dtypes and shapes, and without `of_tensors` its values.

    Raises:
        ConfigError: the batches differ.
    """
    pairs = list(zip(named_leaves(batch), flatten(finished)[0], strict=True))
    differing = {path: value for (path, value), other in pairs if find_difference(value, other)}
    if any(value.dim() != BATCH_DIMS for value in differing.values()):
        raise ConfigError("the collate function does not stack the pictures")
    finish = DeferredTransforms(frozenset(differing), trailing)
    if not of_tensors and find_difference(finish(batch), exact):
        raise ConfigError("values of the batch differ")
    for result, expected, other in zip(*(flatten(part)[0] for part in (finish(batch), finished, exact)), strict=True):
        if isinstance(other, Tensor) and not (
            (result.dtype, result.shape) == (expected.dtype, expected.shape) == (other.dtype, other.shape)
            and torch.allclose(result, expected, atol=1e-5, equal_nan=True)
        ):
            raise ConfigError(
                "values of the batch differ in dtype, shape or more than rounding from those of PIL images"
            )
    return finish
