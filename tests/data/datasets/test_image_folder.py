"""A folder of images becomes a dataset of one size, mode and scale."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.image_folders import CLASSES, check_loaders, load, write_image
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.errors import ConfigError, DataError


@pytest.mark.parametrize(("mode", "channels", "hint"), [("grey", 1, "=grey; rgb keeps colours"), ("rgb", 3, "=rgb")])
def test_a_folder_becomes_a_dataset(
    folder: Path, mode: str, channels: int, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pets = load(folder, mode=mode, size=8)
    assert f"24 train and 6 test images of 3 classes: cat, dog, eel (data.dataset.mode{hint})" in caplog.text
    assert pets.name == "images"
    assert pets.train.classes == CLASSES
    assert (len(pets.train), len(pets.test)) == (24, 6)
    assert pets.train.images.shape == (24, channels, 8, 8)
    assert pets.train.images.dtype == torch.uint8
    assert pets.test.labels.bincount().tolist() == [2, 2, 2]
    assert (pets.train.mean, pets.train.std) == compute_statistics(pets.train.images)
    assert (pets.test.mean, pets.test.std) == (pets.train.mean, pets.train.std)


@pytest.mark.parametrize("size", [[8, 20], 9, "large", [8], [8, 9, 10], [8, 9.5], True])
def test_the_size_is_a_number_or_height_and_width(folder: Path, size: object) -> None:
    if size not in ([8, 20], 9):
        message = rf"data\.dataset\.size={re.escape(str(size))}: must be a number of pixels, or \[height, width\]"
        with pytest.raises(ConfigError, match=message):
            load(folder, size=size)
        return
    train = load(folder, size=size, resize="pad", mode="grey").train
    assert train.images.shape[1:] == (1, *(size if isinstance(size, list) else (size, size)))
    check_loaders(train)


def test_images_are_in_colour_if_any_of_a_hundred_of_the_splits_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Grey images in RGB files have no colours, whichever their format. An unreadable image does not count."""
    for path in folder.glob("*/*.png"):
        write_image(path.with_suffix(".jpg"), int(path.stem), mode="L")
        with Image.open(path.with_suffix(".jpg")) as image:
            image.convert("RGB").save(path)
    (folder / "eel" / "broken.png").write_bytes(b"no image")
    assert load(folder, skip_unreadable=True).train.images.shape[1] == 1
    write_image(folder / "eel" / "colours.webp", 7)
    assert load(folder, skip_unreadable=True).train.images.shape[1] == 3
    (folder / "labels.csv").write_text("file,label,by\ncat/0.png,cat,me\ndog/0.png,dog,me\n")
    assert load(folder, labels=str(folder / "labels.csv"), test_share=0).train.images.shape[1] == 1
    assert caplog.text.count("columns that are not used: 'by'") == 1


def write_deep(path: Path, values: object, dtype: str, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values).astype(dtype)).save(path, **options)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_images_of_32_bits_need_a_range_and_have_that_scale(folder: Path, dtype: str) -> None:
    """All images have one scale, so that equal values stay equal. 8 and 16 bits are scaled by their types."""
    ramps = {}
    for number, path in enumerate(sorted(folder.glob("*/*.png"))[::3]):
        ramps[str(path.relative_to(folder))[:-3] + "tif"] = ramp = np.full((8, 8), 100 + 100.0 * number)
        write_deep(path.with_suffix(".tif"), ramp, dtype)
        path.unlink()
    write_deep(folder / "cat" / "deep.png", np.full((8, 8), 257 * 33), "uint16")
    write_deep(folder / "eel" / "damaged.tif", np.full((8, 8), np.nan), "float32")
    with pytest.raises(DataError, match=r"its 32-bit pixels are \d+ to \d+; .*needs data\.dataset\.range_32_bit=\["):
        load(folder, size=8)
    with pytest.raises(ConfigError, match=r"data\.dataset\.range_32_bit=\[3\.0, 3\.0\]: black and white must differ"):
        load(folder, skip_unreadable=True, range_32_bit=(3, 3))
    pets = load(folder, size=8, skip_unreadable=True, range_32_bit=(0, 500))
    for split in pets.splits.values():
        for row, name in enumerate(split.files.names):
            assert np.array_equal(split.images[row, 0], split.files[row][..., 0]), "as disk reads it"
            if name in ramps or name.endswith("deep.png"):
                scaled = 33 if name not in ramps else ramps[name][0, 0] * 255 / 500
                assert (split.images[row] == min(255, round(scaled))).all()
    assert (len(ramps), pets.skipped) == (10, 1)


@pytest.mark.parametrize(
    ("dtype", "highest", "options"), [("uint16", 4095, {}), ("float32", 4095, {"range_32_bit": (-3.4e38, 4095)})]
)
def test_images_with_little_contrast_cause_a_warning_that_names_the_scaling_keys(
    folder: Path, dtype: str, highest: int, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Such images are from cameras of 12 bits, or have a value that stands for no data."""
    for number, path in enumerate(folder.glob("*/*.png")):
        write_deep(path.with_suffix(".tif"), np.full((8, 8), highest * (number % 2)), dtype)
        path.unlink()
    for count in (1, 2):  # the images are decoded the first time, and in the cache the second
        load(folder, **options)
        assert caplog.text.count("the pixels hardly differ") == count
    assert "set data.dataset.max_16_bit=4095" in caplog.text
    assert "data.dataset.range_32_bit=[BLACK,WHITE]" in caplog.text
    caplog.clear()
    scaled = load(folder, max_16_bit=4095, range_32_bit=(0, 4095))
    assert sorted(scaled.train.images.unique().tolist()) == [0, 255]
    assert "hardly differ" not in caplog.text
