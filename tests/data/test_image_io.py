"""Images of any mode and orientation are read as they look."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmnist.data.image_io import read_picture

GREY = Image.new("RGB", (9, 9), (153, 153, 153))


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        *((GREY.convert(mode), 153) for mode in ("L", "LA", "P", "RGB", "RGBA", "CMYK")),
        (Image.new("1", (9, 9), 1), 255),
        (Image.fromarray(np.full((9, 9), 39_321, dtype=np.uint16)), 153),
        (Image.fromarray(np.full((9, 9), 39_321, dtype=np.int32)), 153),
        (Image.fromarray(np.full((9, 9), 153, dtype=np.int32)), 153),
        (Image.fromarray(np.full((9, 9), 153, dtype=np.float32)), 153),
        (Image.fromarray(np.full((9, 9), 0.6, dtype=np.float32)), 153),
        (Image.new("RGBA", (9, 9), (0, 0, 0, 0)), 255),  # transparent pixels become white
    ],
)
@pytest.mark.parametrize("mode", ["grey", "rgb"])
def test_any_mode_of_picture_keeps_its_brightness(tmp_path: Path, image: Image.Image, expected: int, mode: str) -> None:
    save(tmp_path / "picture.tif", image)
    assert np.asarray(read_picture(tmp_path / "picture.tif", (5, 5), mode)).mean() == pytest.approx(expected, abs=1)


def test_a_picture_stands_upright(tmp_path: Path) -> None:
    """As its EXIF orientation says."""
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[4:] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # rotated by 180 degrees
    save(tmp_path / "turned.png", Image.fromarray(pixels), exif=exif)
    found = np.asarray(read_picture(tmp_path / "turned.png", (8, 8), "grey"))
    assert (found == pixels[::-1, ::-1]).all()
