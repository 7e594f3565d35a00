"""The rows of a Hugging Face `datasets.Dataset` as pairs of an image and a label.

The package is not imported: what is needed of it are `features`, `column_names`, `format`, `with_format` and
`_fingerprint`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from vitmnist.data.image_io import to_tensor
from vitmnist.errors import DataError

PIXEL_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}  # for images whose values are bits, or indices of a palette
Pair = tuple[Any, int]


class RowPairs(Dataset[Pair]):
    """Row i as an image, uint8 `[C, H, W]` if it is a picture, and a label.

    Args:
        rows: with one column of images (the feature `Image`, or arrays of two or three dimensions; those of two get a
            channel) and one of labels (the only `ClassLabel`, or else the only integers). The images of a transform
            (`with_transform`) are taken as they are.

    Raises:
        DataError: no such columns, or more than one; names the columns.
    """

    def __init__(self, rows: Any) -> None:
        self.image, self.label = find_columns(rows.features)
        self.fingerprint = f"{rows._fingerprint}, image {self.image}, label {self.label}"
        self.is_transformed = rows.format["type"] == "custom"
        feature = rows.features[self.image]
        self._dtype = None if is_image(feature) else _array_dtype(feature)
        # Columns that are not needed are neither read nor decoded.
        columns = [self.image, self.label]
        self._rows = rows if self.is_transformed else rows.with_format(self._dtype and "numpy", columns=columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Pair:
        row = self._rows[index]
        if missing := {self.image, self.label} - set(row):
            raise DataError(f"row {index}: the transform has removed the column {', '.join(sorted(missing))}")
        return self._pair(index, row[self.image], row[self.label])

    def read(self, indices: Sequence[int]) -> list[Pair]:
        """The same samples in one query, which saves most of the time of small images."""
        rows = self._rows[indices]
        return [self._pair(*row) for row in zip(indices, rows[self.image], rows[self.label], strict=True)]

    def _pair(self, index: int, image: Any, label: Any) -> Pair:
        for column, value in ((self.image, image), (self.label, label)):
            # Without a value, NumPy's integers are NaN.
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise DataError(f"row {index}: the column {column} has no value; leave the row out with filter()")
        if isinstance(image, Image.Image):
            image = to_tensor(image.convert(PIXEL_MODES.get(image.mode, image.mode)))
        elif not self.is_transformed:
            image = torch.from_numpy(np.asarray(image, self._dtype))
            image = image.unsqueeze(0) if image.dim() == 2 else image
        return image, int(label)


def is_hugging_face(data: object) -> bool:
    """Whether an object is a Hugging Face data set."""
    return all(hasattr(data, name) for name in ("features", "column_names", "_fingerprint"))


def find_columns(features: Any) -> tuple[str, str]:
    """The names of the columns of images and labels; raises as `RowPairs`."""
    images = [name for name, feature in features.items() if is_image(feature)]
    images = images or [name for name, feature in features.items() if _array_dtype(feature)]
    labels = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    labels = labels or [name for name, feature in features.items() if _is_integer(feature)]
    for kind, found, expected in (
        ("image", images, "the feature Image, or arrays of two or three dimensions"),
        ("label", labels, "the feature ClassLabel, or integers"),
    ):
        if len(found) != 1:
            number = f"{len(found)} columns of {kind}s, {', '.join(found)}" if found else f"no {kind} column"
            columns = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
            raise DataError(
                f"the data set has {number}, and needs one: {expected}; its columns are {columns}. "
                "select_columns() leaves columns out; from_dataloader() takes rows of any kind"
            )
    return images[0], labels[0]


def is_image(feature: Any) -> bool:
    """Whether a column has pictures, which the data set decodes."""
    return type(feature).__name__ == "Image"


def _is_integer(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and feature.dtype.startswith(("int", "uint"))


def _array_dtype(feature: Any) -> str | None:
    """The dtype of a column of arrays with two or three dimensions; None if it is another column."""
    dimensions = len(getattr(feature, "shape", ()))  # of Array2D and Array3D
    while (inner := getattr(feature, "feature", None)) is not None:  # of nested lists
        feature, dimensions = inner, dimensions + 1
    dtype = getattr(feature, "dtype", "")
    return dtype if dimensions in (2, 3) and dtype.startswith(("int", "uint", "float")) else None
