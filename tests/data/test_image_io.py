"""Images of any mode and orientation are read as they look, and a JPEG at a smaller scale almost so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from torchvision import transforms
from torchvision.transforms.functional import pil_to_tensor

from tests.support.pictures import smooth
from vitmnist.data import image_io
from vitmnist.data.image_io import Resize, read_picture
from vitmnist.data.picture import to_image
from vitmnist.errors import DataError

GREY = Image.new("RGB", (9, 9), (153, 153, 153))


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


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
    save(tmp_path / "photo.jpg", smooth(0, (371, 243)).convert(mode), exif=turned(orientation), quality=90)
    for resize in Resize:
        full, draft = (
            np.asarray(read_picture(tmp_path / "photo.jpg", (40, 30), "rgb", resize, draft), dtype=float)
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
    save(tmp_path / "photo.jpg", smooth(0, (371, 243)).convert(mode), exif=turned(orientation))
    with Image.open(tmp_path / "photo.jpg") as image:
        expected = ImageOps.exif_transpose(image).resize(size, Image.Resampling.BILINEAR)
    found = read_picture(tmp_path / "photo.jpg", size, "rgb" if mode == "RGB" else "grey")
    assert (found.mode, found.size) == (expected.mode, expected.size)
    assert np.abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("sides", [(371, 243), (243, 371), (50, 300), (30, 20), (64, 64)])
def test_a_crop_is_that_of_torchvision(tmp_path: Path, sides: tuple[int, int], orientation: int) -> None:
    save(tmp_path / "photo.png", smooth(0, sides), exif=turned(orientation))
    with Image.open(tmp_path / "photo.png") as image:
        pixels = pil_to_tensor(ImageOps.exif_transpose(image))
    shorter = transforms.Resize(64, antialias=True)(pixels)
    expected = transforms.CenterCrop(64)(shorter)
    found = pil_to_tensor(read_picture(tmp_path / "photo.png", (64, 64), "rgb", "crop"))
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(("sides", "box"), [((90, 45), (0, 15, 60, 45)), ((30, 60), (15, 0, 45, 60))])
def test_a_padded_picture_is_whole_and_its_margin_black(
    tmp_path: Path, sides: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    picture = smooth(0, sides).point(lambda value: max(value, 9))
    save(tmp_path / "photo.png", picture)
    found = read_picture(tmp_path / "photo.png", (60, 60), "rgb", "pad")
    whole = picture.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BILINEAR)
    assert np.abs(np.asarray(found.crop(box), dtype=int) - np.asarray(whole, dtype=int)).max() <= 1
    assert found.getbbox() == box


def test_a_picture_that_is_too_narrow_to_be_cropped_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "line.png", Image.new("L", (3000, 1)))
    with pytest.raises(DataError, match=r"line\.png: cannot be read as a picture: 3000×1 pixels are more than 65535"):
        read_picture(tmp_path / "line.png", (64, 64), "rgb", "crop")


def noisy(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """A picture in which every rounding shows."""
    pixels = np.asarray(smooth(0, size), dtype=int) + np.random.default_rng(0).integers(-40, 41, (*size[::-1], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *(("RGB", {"subsampling": sampling, "quality": quality}) for sampling in (0, 1, 2) for quality in (20, 75, 95)),
        ("RGB", {"progressive": True}),
        ("RGB", {"progressive": True, "subsampling": 1, "optimize": True}),
        ("RGB", {"restart_marker_blocks": 3}),
        ("RGB", {"keep_rgb": True}),
        ("L", {}),
        ("L", {"progressive": True}),
        ("CMYK", {}),
    ],
)
def test_both_decoders_of_jpegs_give_the_same_pixels(
    tmp_path: Path, mode: str, options: dict[str, int], draft: bool
) -> None:
    """A model card has Pillow's alone."""
    assert image_io._jpeg_decoder() is not None, "this torchvision has no decoder, or one that differs"
    for number, side in enumerate([(64, 64), (37, 83), (161, 120), (1, 9)]):
        save(tmp_path / "photo.jpg", noisy(side, mode), exif=turned(1 + (number + 5) % 8), **options)
        for target, channels in (((30, 20), "rgb"), ((200, 200), "rgb"), ((30, 20), "grey")):
            with Image.open(tmp_path / "photo.jpg") as opened:
                expected = to_image(opened, target, channels, "stretch", draft)
            assert read_picture(tmp_path / "photo.jpg", target, channels, draft=draft) == expected


def test_a_truncated_jpeg_is_an_error_unless_pillow_is_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "photo.jpg", noisy((90, 60)))
    content = (tmp_path / "photo.jpg").read_bytes()
    for length in (len(content) // 2, len(content) - 2):
        (tmp_path / "photo.jpg").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"photo\.jpg: cannot be read as a picture: image file is truncated"):
            read_picture(tmp_path / "photo.jpg", (90, 60), "rgb")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert read_picture(tmp_path / "photo.jpg", (90, 60), "rgb").size == (90, 60)


def test_without_torchvisions_decoder_or_if_it_fails_or_differs_pillow_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "photo.jpg", noisy((90, 60)))
    expected = read_picture(tmp_path / "photo.jpg", (90, 60), "rgb")

    def inverted(content: object, *_: object) -> object:
        return 255 - decode(content, 3, False)

    def not_built(*_: object) -> object:
        raise RuntimeError("decode_jpeg: torchvision not compiled with libjpeg support")

    decode = image_io.torch.ops.image.decode_jpeg.default
    for other in (inverted, not_built):
        image_io._jpeg_decoder.cache_clear()
        monkeypatch.setattr(image_io.torch.ops.image.decode_jpeg, "default", other)
        assert image_io._jpeg_decoder() is None
        assert read_picture(tmp_path / "photo.jpg", (90, 60), "rgb") == expected
    image_io._jpeg_decoder.cache_clear()
    monkeypatch.setattr(image_io, "find_spec", lambda name: None)
    assert image_io._jpeg_decoder() is None
    assert read_picture(tmp_path / "photo.jpg", (90, 60), "rgb") == expected
    image_io._jpeg_decoder.cache_clear()


def test_a_file_that_is_replaced_while_it_is_read_is_either_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is read before its pixels; the pixels of another size would be cut, and padded with black."""
    file, other = tmp_path / "photo.jpg", tmp_path / "other.jpg"
    Image.new("RGB", (300, 20), "blue").save(file)
    Image.new("RGB", (20, 300), "lime").save(other)
    open_image = Image.open

    def open_and_replace(path: Path) -> Image.Image:
        opened = open_image(path)
        other.replace(file)
        return opened

    expected = read_picture(file, (16, 16), "rgb")
    monkeypatch.setattr(Image, "open", open_and_replace)
    assert read_picture(file, (16, 16), "rgb") == expected
