"""The rows of a Hugging Face `datasets.Dataset` as pairs of an image and a label; the package is not imported."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from vitmnist.data.image_io import to_tensor
from vitmnist.errors import DataError

PIXEL_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}  # for images whose values are bits, or indices of a palette


class RowPairs(Dataset[tuple[Any, Any]]):
    """Row i as an image (pictures become uint8 `[C, H, W]`) and a label, an integer or float32; raises `DataError`.

    `image` and `label` name the columns; None takes the only one of that name or with the feature Image or ClassLabel.
    """

    def __init__(self, rows: Any, image: str | None = None, label: str | None = None) -> None:
        self.columns = [_column(rows, "image", image, "Image"), _column(rows, "label", label, "ClassLabel")]
        contents = getattr(rows, "_fingerprint", None)
        self.fingerprint = contents and f"{contents}, image {self.columns[0]}, label {self.columns[1]}"
        self.is_transformed = rows.format["type"] == "custom"
        feature = rows.features[self.columns[0]]
        while hasattr(feature, "feature"):  # of nested lists
            feature = feature.feature
        self._dtype = None if type(feature).__name__ == "Image" or self.is_transformed else feature.dtype
        # Columns that are not needed are neither read nor decoded.
        self._rows = rows if self.is_transformed else rows.with_format(self._dtype and "numpy", columns=self.columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """These samples in one query, which saves most of the time for small images."""
        rows = self._rows[indices]
        pairs = list(zip(*(rows[column] for column in self.columns), strict=True))
        try:
            is_missing = any(image is None or label is None or np.isnan(label) for image, label in pairs)  # None is NaN
        except (TypeError, ValueError) as error:  # text, or several labels
            raise DataError(
                f"the column {self.columns[1]}: a label must be a number; class_encode_column() makes one of text"
            ) from error
        if is_missing:
            raise DataError(f"rows from {indices[0]} on: one has no image or no label; leave it out with filter()")
        return [(self._image(image), _label(label)) for image, label in pairs]

    def _image(self, image: Any) -> Any:
        if isinstance(image, Image.Image):
            return to_tensor(image.convert(PIXEL_MODES.get(image.mode, image.mode)))
        if not self._dtype:
            return image
        array = torch.from_numpy(np.array(image, self._dtype))
        return array.unsqueeze(0) if array.dim() == 2 else array  # two dimensions get a channel


def _label(label: Any) -> Any:
    return torch.tensor(label, dtype=torch.float32) if isinstance(label, float | np.floating) else int(label)


def _column(rows: Any, kind: str, name: str | None, feature: str) -> str:
    types = {key: type(value).__name__ for key, value in rows.features.items()}
    found = [key for key in types if (key == name if name else key == kind or types[key] == feature)]
    if len(found) == 1:
        return str(found[0])
    columns = ", ".join(f"{key} ({value})" for key, value in types.items())
    raise DataError(
        f"{len(found) or 'no'} columns for the {kind}; the dataset has {columns}; name one with {kind}=COLUMN of "
        f"make_loader, or rename_column() it to {kind}"
    )
