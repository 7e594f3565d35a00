"""Images of any mode and orientation are read as they look, and a JPEG at a smaller scale almost so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.pictures import smooth
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


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_at_a_smaller_scale_looks_the_same(tmp_path: Path, mode: str, orientation: int) -> None:
    """Its sides are no multiples of the scale, and the target is not square."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(tmp_path / "photo.jpg", smooth(0, (371, 243)).convert(mode), exif=exif, quality=90)
    full, draft = (
        np.asarray(read_picture(tmp_path / "photo.jpg", (40, 30), "rgb", draft=draft), dtype=float)
        for draft in (False, True)
    )
    assert draft.shape == full.shape == (30, 40, 3)
    assert 0 < np.abs(draft - full).mean() < 0.5  # 0: it was decoded in full
    assert np.abs(draft - full).max() <= 4


@pytest.mark.parametrize(
    ("name", "size"), [("photo.png", (40, 30)), ("photo.webp", (40, 30)), ("photo.jpg", (186, 122))]
)
def test_other_formats_and_jpegs_that_are_not_twice_the_size_are_decoded_in_full(
    tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    save(tmp_path / name, smooth(0, (371, 243)))
    full, draft = (read_picture(tmp_path / name, size, "rgb", draft=draft) for draft in (False, True))
    assert full == draft


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("size", "mode"), [((40, 30), "RGB"), ((300, 400), "L")])
def test_without_a_draft_a_jpeg_is_what_pillow_makes_of_all_its_pixels(
    tmp_path: Path, size: tuple[int, int], mode: str, orientation: int
) -> None:
    """Upright, and to 1 of 255."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(tmp_path / "photo.jpg", smooth(0, (371, 243)).convert(mode), exif=exif)
    with Image.open(tmp_path / "photo.jpg") as image:
        expected = ImageOps.exif_transpose(image).resize(size, Image.Resampling.BILINEAR)
    found = read_picture(tmp_path / "photo.jpg", size, "rgb" if mode == "RGB" else "grey")
    assert (found.mode, found.size) == (expected.mode, expected.size)
    assert np.abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1
