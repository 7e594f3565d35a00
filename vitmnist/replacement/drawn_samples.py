"""Samples whose random transforms are drawn in order, before threads apply them to one picture each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from vitmnist.data.threads import in_parts
from vitmnist.replacement.decoded_dataset import Prepared, TransformedDataset
from vitmnist.replacement.drawn_transforms import Shape, draw
from vitmnist.replacement.halves import Transform, apply, complete
from vitmnist.replacement.samples import Samples, naming
from vitmnist.replacement.tensor_form import Converted, Normalized
from vitmnist.runtime.cpu import available_cores

PARTS = 4  # of a batch, for each thread: large crops take longer

DrawnPicture = tuple[Tensor, Sequence[Transform], Shape]
"""A kept picture, not to be changed, its transforms with their parameters, and the shape that they give it."""


class DrawnDataset(TransformedDataset):
    """A `TransformedDataset` of pictures as tensors, whose random transforms are all known to `draw`.

    Args:
        transforms: of each of the dataset's `Halves`, without the closing ones.
        dtype: of a picture after the closing transforms.
        threads: at least as many as torch uses; in a worker, one.
    """

    def __init__(self, *args: Any, transforms: Sequence[list[Transform]], dtype: torch.dtype, threads: int) -> None:
        super().__init__(*args)
        views = replace(self._samples, as_views=True)
        vars(self).update(_views=views, _transforms=transforms, _dtype=dtype, _threads=threads)

    def __getitems__(self, indices: Sequence[int]) -> DrawnSamples:
        """Draws the random parameters of a batch, from torch's generator."""
        self._state.check()
        drawn = []
        for index in indices:
            with naming(f"sample {index}"):
                numbers, sample, calls = self._views[index]
                pictures: list[DrawnPicture] = []
                for number, (image,) in zip(numbers, calls, strict=True):
                    pictures.append((image, *draw(self._transforms[number], tuple(image.shape))))
                drawn.append((index, sample, pictures))
        threads = 1 if get_worker_info() else max(torch.get_num_threads(), min(self._threads, available_cores()))
        return DrawnSamples(drawn, self._views, self._dtype, threads)


class DrawnSamples(Prepared):
    """The samples of a batch before their transforms are applied.

    Args:
        drawn: of each sample its index, its structure, and what its pictures are made of.
    """

    def __init__(
        self, drawn: list[tuple[int, Any, list[DrawnPicture]]], views: Samples, dtype: torch.dtype, threads: int
    ) -> None:
        self._drawn, self._views, self._dtype, self._threads = drawn, views, dtype, threads

    @property
    def content(self) -> list[Any]:
        """The samples without their closing transforms."""
        return self._made([], [])

    def finished(self, closing: Sequence[Transform]) -> Any:
        """The batch that torch's `default_collate` makes of the finished samples."""
        # In rows that follow one another, in place of tensors that are copied into a batch.
        batches: list[tuple[Tensor, list[Tensor]]] = []
        for pictures in zip(*(pictures for *_, pictures in self._drawn), strict=False):
            batch = torch.empty((len(pictures), *pictures[0][2]), dtype=self._dtype)
            batches.append((batch, list(batch)))

        def stack(rows: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
            for batch, own in batches:
                if len(own) == len(rows) and all(one is row for one, row in zip(own, rows, strict=True)):
                    return batch
            return collate_tensor_fn(rows, collate_fn_map=collate_fn_map)

        samples = self._made(closing, [rows for _, rows in batches])
        return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})

    def _made(self, closing: Sequence[Transform], rows: list[list[Tensor]]) -> list[Any]:
        """The samples; with rows for the pictures of the calls of each sample, they are these if shapes allow it."""
        samples: list[Any] = [None] * len(self._drawn)

        def make(span: slice) -> None:
            for place in range(*span.indices(len(samples))):
                index, sample, pictures = self._drawn[place]
                with naming(f"sample {index}"):
                    self._views.check(index)
                    results = []
                    for call, (image, steps, _) in enumerate(pictures):
                        (result,) = apply(steps, (image,))
                        row = rows[call][place] if call < len(rows) else None
                        results.append((_closed(result, closing, row),))
                    samples[place] = complete(sample, results)

        in_parts(make, len(samples), PARTS, self._threads)
        return samples


def _closed(image: Tensor, closing: Sequence[Transform], row: Tensor | None) -> Tensor:
    """A picture after its closing transforms, in a row of the batch if it has the shape and dtype of that."""
    if row is None or image.shape != row.shape:
        return apply(closing, (image,))[0]  # type: ignore[no-any-return]
    last = [one for one in closing[-1:] if isinstance(one, Normalized)]
    others = closing[: len(closing) - len(last)]
    if list(others) == [Converted(to_float=True)]:
        row.copy_(image).div_(255)  # in half the time of a float picture that is then copied
    else:
        (result,) = apply(others, (image,))
        if result.dtype != row.dtype:
            return apply(last, (result,))[0]  # type: ignore[no-any-return]
        row.copy_(result)
    for one in last:
        one.in_place(row)
    return row
