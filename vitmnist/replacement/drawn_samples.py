"""Samples whose random transforms are drawn in order, before threads apply them to one picture each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from vitmnist.errors import naming
from vitmnist.replacement.decoded_dataset import FetchedBatch, TransformedDataset
from vitmnist.replacement.drawn_transforms import Shape, draw
from vitmnist.replacement.split_transforms import Transform, apply, with_results
from vitmnist.replacement.tensor_transforms import Converted, Normalized
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.ordered_map import in_parts

TO_FLOAT = Converted(to_float=True)

DrawnPicture = tuple[Tensor, Sequence[Transform], Shape]
"""A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each of the dataset's `SplitTransforms`, without the trailing ones.
        dtype: of a picture after the trailing transforms.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, transforms: Sequence[list[Transform]], dtype: torch.dtype, threads: int) -> None:
        super().__init__(*args)
        vars(self).update(_transforms=transforms, _dtype=dtype, _threads=min(threads, available_cores()))

    def __getitems__(self, indices: Sequence[int]) -> DrawnSamples:
        """Draws the random parameters of a batch, from torch's generator."""
        drawn: list[tuple[int, Any, list[DrawnPicture]]] = []
        for index in indices:
            with naming(f"sample {index}"):
                numbers, sample, calls = self._samples.view(index)
                pictures: list[DrawnPicture] = []
                for number, (image,) in zip(numbers, calls, strict=True):
                    pictures.append((image, *draw(self._transforms[number], tuple(image.shape))))
                drawn.append((index, sample, pictures))
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), self._threads)
        return DrawnSamples(drawn, self._dtype, threads)


@dataclass
class DrawnSamples(FetchedBatch):
    """The samples of a batch before their transforms are applied.

    Args:
        drawn: the index of each sample, the sample with its placeholders, and what its pictures are made of.
    """

    drawn: list[tuple[int, Any, list[DrawnPicture]]]
    dtype: torch.dtype
    threads: int

    @property
    def content(self) -> list[Any]:
        """The samples without their trailing transforms."""
        return self._made([], [])

    def finished(self, trailing: Sequence[Transform]) -> Any:
        """The batch that torch's `default_collate` makes of the finished samples."""
        # In rows that follow one another, in place of tensors that are copied into a batch.
        batches: list[tuple[Tensor, list[Tensor]]] = []
        for pictures in zip(*(pictures for *_, pictures in self.drawn), strict=True):
            batch = torch.empty((len(pictures), *pictures[0][2]), dtype=self.dtype, device="cpu")
            batches.append((batch, list(batch)))

        def stack(rows: list[Tensor], *, collate_fn_map: Any = None) -> Any:
            for batch, batch_rows in batches:
                if all(row is result for row, result in zip(batch_rows, rows, strict=True)):
                    return batch
            return collate_tensor_fn(rows, collate_fn_map=collate_fn_map)

        samples = self._made(trailing, [rows for _, rows in batches])
        return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})

    def _made(self, trailing: Sequence[Transform], rows: list[list[Tensor]]) -> list[Any]:
        """The samples; with rows for the pictures of each of their calls, they are these if their shapes allow it."""
        samples: list[Any] = [None] * len(self.drawn)

        def make(span: slice) -> None:
            for place in range(*span.indices(len(samples))):
                index, sample, pictures = self.drawn[place]
                with naming(f"sample {index}"):
                    results = []
                    for call, (image, steps, _) in enumerate(pictures):
                        (result,) = apply(steps, (image,))
                        results.append(_finished(result, trailing, rows[call][place] if rows else None))
                samples[place] = with_results(sample, [(result,) for result in results])

        in_parts(make, len(samples), 1, self.threads)
        return samples


def _finished(image: Tensor, trailing: Sequence[Transform], row: Tensor | None) -> Tensor:
    """A picture after its trailing transforms, in a row of the batch if it has the shape and dtype of that."""
    if row is None or image.shape != row.shape:
        return apply(trailing, (image,))[0]  # type: ignore[no-any-return]
    if trailing and trailing[0] == TO_FLOAT and row.dtype == torch.get_default_dtype():
        image, trailing = torch.div(image, 255, out=row), trailing[1:]
    for transform in trailing:
        is_last = isinstance(transform, Normalized) and image.dtype == row.dtype
        image = transform(image, out=row) if is_last else apply([transform], (image,))[0]
    return image if image is row or image.dtype != row.dtype else row.copy_(image)
