"""Images of any mode and orientation are read as they look, and a JPEG at a smaller scale almost so."""

import struct
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from PIL import Image, ImageFile, ImageOps

from tests.support.pictures import smooth
from vitmnist.data.image_listing import EXTENSIONS
from vitmnist.data.images import ImageReader, Pixels, ResizeMode, fit_size
from vitmnist.errors import DataError

GREY = Image.new("RGB", (9, 9), (153, 153, 153))


def as_image(pixels: Pixels) -> Image.Image:
    assert pixels.flags.c_contiguous
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)


def read_image(path: Path, size: tuple[int, int], *options: Any, **named: Any) -> Image.Image:
    """Read an image of this height and width."""
    return as_image(ImageReader(size, *options, **named)(path))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        *((GREY.convert(mode), 153) for mode in ("L", "LA", "P", "RGB", "RGBA", "CMYK")),
        (Image.new("1", (9, 9), 1), 255),
        (Image.fromarray(np.full((9, 9), 39_321, dtype=np.uint16)), 153),
        (Image.fromarray(np.full((9, 9), 50, dtype=np.int32)), 153),
        (Image.fromarray(np.full((9, 9), 50, dtype=np.float32)), 153),
        (Image.fromarray(np.full((9, 9), 900, dtype=np.float32)), 255),
        (Image.new("RGBA", (9, 9), (0, 0, 0, 0)), 255),  # transparent pixels become white
    ],
)
@pytest.mark.parametrize("mode", ["grey", "rgb"])
def test_any_mode_of_image_keeps_its_brightness(tmp_path: Path, image: Image.Image, expected: int, mode: str) -> None:
    image.save(tmp_path / "image.tif")
    found = np.asarray(read_image(tmp_path / "image.tif", (5, 5), mode, range_32_bit=(-100, 150)))
    assert found.mean() == pytest.approx(expected, abs=1)


def test_pixels_of_16_bits_are_scaled_by_one_rule(tmp_path: Path) -> None:
    """16-bit pixels are scaled by their type, whatever their values are. Transparent pixels of a PNG file are white."""
    dark = np.full((9, 9), 200, np.uint16)  # values that would fit into 8 bits
    (tmp_path / "dark.pgm").write_bytes(b"P5 9 9 65535\n" + dark.astype(">u2").tobytes())
    assert read_image(tmp_path / "dark.pgm", (9, 9), "grey").getextrema() == (1, 1)
    dark[0] = 4095
    Image.fromarray(dark).save(tmp_path / "deep.png", transparency=200)
    Image.fromarray((dark // 16).astype(np.uint8)).save(tmp_path / "twin.png", transparency=200 // 16)
    deep, twin = (read_image(tmp_path / name, (9, 9), "grey", max_16_bit=4095) for name in ("deep.png", "twin.png"))
    assert deep == twin


def write_tiff(path: Path, pixels: np.ndarray[Any, Any], photometric: int, sample_format: int) -> None:
    """Write a grey TIFF file with tags that Pillow does not write."""
    height, width = pixels.shape
    tags = {256: width, 257: height, 258: 8 * pixels.itemsize, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height}
    tags |= {279: pixels.nbytes, 339: sample_format}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    content = pixels.tobytes() + struct.pack("<H", len(tags)) + entries + bytes(4)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + pixels.nbytes) + content)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_white_is_zero_where_a_tiff_file_says_so(tmp_path: Path, dtype: str) -> None:
    pixels = (np.arange(16).reshape(4, 4) * 17).astype(dtype) * {"uint16": 257}.get(dtype, 1)
    for photometric, expected in ((1, np.arange(16) * 17), (0, 255 - np.arange(16) * 17)):
        write_tiff(tmp_path / "a.tif", pixels.astype(dtype), photometric, 3 if dtype == "float32" else 1)
        found = read_image(tmp_path / "a.tif", (4, 4), "grey", range_32_bit=(0, 255))
        assert np.asarray(found).flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("ending", EXTENSIONS)
def test_images_of_every_ending_are_read_and_of_several_frames_the_first(tmp_path: Path, ending: str) -> None:
    first, second = (smooth(seed, (64, 48)).convert("L").convert("RGB") for seed in (0, 1))
    frames = {"save_all": True, "append_images": [second]} if ending in (".gif", ".avif", ".webp", ".tif") else {}
    first.save(tmp_path / f"image{ending}", **frames)
    found = np.asarray(read_image(tmp_path / f"image{ending}", (48, 64), "grey"), dtype=float)
    assert np.abs(found - np.asarray(first.convert("L"))).mean() < 2


STORED = {
    **{name: {"quality": 90} for name in ("photo.jpg", "grey.jpg", "cmyk.jpg")},
    **{name: {} for name in ("photo.png", "photo.webp", "photo.avif", "raw.tif", "grey.tif")},
    "lzw.tif": {"compression": "tiff_lzw"},
    "jpeg.tif": {"compression": "jpeg"},
}
"""Every format that has an orientation."""


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", STORED)
def test_images_are_upright_in_every_format_and_resize_mode(tmp_path: Path, name: str, orientation: int) -> None:
    """The sides are no multiples of the scales of a JPEG. Pillow turns a TIFF file while it is loaded."""
    mode, target = {"grey.jpg": "L", "grey.tif": "L", "cmyk.jpg": "CMYK"}.get(name, "RGB"), (40, 30)
    smooth(0, (371, 243)).convert(mode).save(tmp_path / name, exif=turned(orientation), **STORED[name])
    with Image.open(BytesIO((tmp_path / name).read_bytes())) as image:  # Pillow maps a raw file, and does not turn it
        upright = ImageOps.exif_transpose(image).convert("RGB")
    assert upright.size == ((371, 243) if orientation < 5 else (243, 371))
    for resize, read in product(ResizeMode, (read_image, read_by_pillow)):
        assert np.array_equal(read(tmp_path / name, upright.size[::-1], "rgb", resize), upright)
        inner = upright.resize(fit_size(upright.size, target, resize), Image.Resampling.BILINEAR)
        left, top = (round((side - to) / 2) for side, to in zip(inner.size, target, strict=True))
        expected = np.asarray(inner.crop((left, top, left + target[0], top + target[1])), dtype=float)
        full, draft = (
            np.asarray(read(tmp_path / name, target[::-1], "rgb", resize, draft), dtype=float)
            for draft in (False, True)
        )
        assert np.abs(full - expected).max() <= 1
        assert np.abs(draft - full).max() <= 4
        # Only a JPEG is decoded at a smaller scale. Other formats are decoded in full.
        assert 0 < np.abs(draft - full).mean() < 0.5 if name.endswith("jpg") else np.array_equal(draft, full)


def read_by_pillow(path: Path, size: tuple[int, int], mode: str, resize: str, draft: bool = False) -> Image.Image:
    """Read an image without the decoder of torchvision."""
    with Image.open(BytesIO(path.read_bytes())) as opened:
        return as_image(ImageReader(size, mode, resize, draft).convert(opened))


def noisy(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """An image in which every rounding shows."""
    pixels = np.asarray(smooth(0, size), dtype=int) + np.random.default_rng(0).integers(-40, 41, (*size[::-1], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *(("RGB", {"subsampling": sampling, "quality": quality}) for sampling in (0, 1, 2) for quality in (20, 75, 95)),
        ("RGB", {"progressive": True, "subsampling": 1, "optimize": True}),
        ("RGB", {"restart_marker_blocks": 3}),
        ("RGB", {"keep_rgb": True}),
        ("L", {}),
        ("CMYK", {}),
    ],
)
def test_both_decoders_of_jpegs_give_the_same_pixels(
    tmp_path: Path, mode: str, options: dict[str, int], draft: bool
) -> None:
    for number, side in enumerate([(64, 64), (37, 83), (161, 120), (1, 9)]):
        noisy(side, mode).save(tmp_path / "photo.jpg", exif=turned(1 + (number + 5) % 8), **options)
        for target, channels in (((20, 30), "rgb"), ((200, 200), "rgb"), ((20, 30), "grey")):
            with Image.open(tmp_path / "photo.jpg") as opened:
                expected = as_image(ImageReader(target, channels, draft=draft).convert(opened))
            assert read_image(tmp_path / "photo.jpg", target, channels, draft=draft) == expected


def test_a_truncated_jpeg_is_an_error_unless_pillow_is_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy((90, 60)).save(tmp_path / "photo.jpg")
    content = (tmp_path / "photo.jpg").read_bytes()
    for length in (len(content) // 2, len(content) - 2):
        (tmp_path / "photo.jpg").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"photo\.jpg: cannot be read as an image: image file is truncated"):
            read_image(tmp_path / "photo.jpg", (60, 90), "rgb")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert read_image(tmp_path / "photo.jpg", (60, 90), "rgb").size == (90, 60)


def test_without_torchvisions_decoder_pillow_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy((90, 60)).save(tmp_path / "photo.jpg")
    expected = read_image(tmp_path / "photo.jpg", (60, 90), "rgb")
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    assert read_image(tmp_path / "photo.jpg", (60, 90), "rgb") == expected
