"""A folder of images: files are found, decoded once, and named if they cannot be read."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.image_folders import CLASSES, check_loaders, load, write_image
from tests.support.pictures import smooth
from vitmnist import make_loader
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets import decoding
from vitmnist.data.image_listing import find_images
from vitmnist.data.sources import hash_tensor
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


def test_images_are_drawn_in_an_order_that_mixes_classes_and_stays(folder: Path) -> None:
    labels = load(folder).train.labels
    assert len(labels[:8].unique()) > 1
    with pytest.raises(ConfigError, match=r"data\.dataset\.train_size=25: the split has 24 images"):
        load(folder, train_size=25)
    few = load(folder, train_size=8).train
    assert torch.equal(few.labels, labels[:8])
    assert few.mean[0] == pytest.approx(float(few.images[:, 0].double().mean()) / 255)
    before = set(load(folder).test.files.names)
    write_image(folder / "eel" / "new.png", 7)
    assert len(before & set(load(folder).test.files.names)) >= len(before) - 1


def test_every_loader_delivers_the_images(folder: Path) -> None:
    """`disk` opens the files, and the other loaders read decoded images. The model gets the same from all."""
    for path in sorted(folder.glob("*/*.png"))[::2]:  # half of the files become JPEG files of many times the size
        smooth(int(path.stem), (150, 110)).save(path.with_suffix(".jpg"))
        path.unlink()
    pets = load(folder, mode="rgb", size=8)
    full = load(folder, mode="rgb", size=8, draft=False)
    is_jpeg = torch.tensor([name.endswith(".jpg") for name in pets.train.files.names])
    assert torch.equal((pets.train.images != full.train.images).flatten(1).any(dim=1), is_jpeg)
    for images in (pets.train, full.train):
        check_loaders(images)


@pytest.mark.needs("POSIX files")
def test_images_are_decoded_again_only_when_they_change_or_are_read_in_another_way(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        before = load(folder)
        load(folder)
        assert caplog.text.count("decoding once") == 1
        changed = folder / before.train.files.names[0]
        write_image(changed, 999)
        after = load(folder)
        assert caplog.text.count("decoding once") == 2
        for number, options in enumerate(({"resize": "pad"}, {"resize": "crop"}, {"size": 9}, {"mode": "grey"}), 3):
            load(folder, **options)
            assert caplog.text.count("decoding once") == number
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "version", lambda package: f"next {package}")  # It can decode to other pixels.
            load(folder)
        assert caplog.text.count("decoding once") == 7
        (folder / "cat" / "gone.png").symlink_to("nowhere.png")
        assert load(folder, skip_unreadable=True).skipped == 1
        (folder / "cat" / "gone.png").unlink()
        again = load(folder, skip_unreadable=True)
    assert (again.skipped, again.train.files, again.test.files) == (0, after.train.files, after.test.files)
    assert not torch.equal(before.train.images[0], after.train.images[0])
    assert torch.equal(before.train.images[1:], after.train.images[1:])


def exchange(first: Path, second: Path) -> None:
    """Exchange two files as `mv` does."""
    moved = first.rename(first.with_name("moved"))
    second.rename(first)
    moved.rename(second)


def restore(first: Path, second: Path) -> None:
    """Exchange the contents of two files, with the same sizes and times, as an archive does."""
    contents = first.read_bytes(), second.read_bytes()
    for path, content in zip((second, first), contents, strict=True):
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))


@pytest.mark.needs("POSIX files")
@pytest.mark.parametrize("change", [exchange, restore])
def test_an_image_replaced_by_one_of_the_same_name_size_and_time_is_decoded_again(
    change: Callable[[Path, Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat_of_one_ctime(path: Path, **options: bool) -> os.stat_result:
        status = os.stat(path, **options)
        return os.stat_result(tuple(status), {"st_ctime_ns": 0, "st_mtime_ns": status.st_mtime_ns})

    if change is exchange:  # Files that are unpacked together can have the same ctime.
        monkeypatch.setattr(Path, "stat", stat_of_one_ctime)
    pair = folder / "cat" / "a.bmp", folder / "dog" / "a.bmp"
    for seed, path in enumerate(pair):
        write_image(path, seed)
        os.utime(path, ns=(0, 0))
    before, _ = load(folder, mode="rgb"), change(*pair)
    after = load(folder, mode="rgb")
    shutil.rmtree(folder.parent / "root")
    assert after.sha256 == load(folder, mode="rgb").sha256 != before.sha256


def test_large_images_have_their_channels_last_in_memory_and_are_the_same(folder: Path) -> None:
    """Crops of bytes are fast only with channels last. Batches of floats are contiguous."""
    train = load(folder, mode="rgb", size=100).train
    assert train.images.is_contiguous(memory_format=torch.channels_last)
    first = replace(train, images=train.images.contiguous(), is_mapped=False)
    assert hash_tensor(train.images) == hash_tensor(first.images) == train.sha256
    preprocess = Preprocess(train, Compose([{"name": "random_resized_crop"}, {"name": "color_jitter"}]))
    keys = torch.arange(len(train))
    assert torch.equal(preprocess(train.images, keys), preprocess(first.images, keys))
    for batch in (preprocess(train.images), preprocess(train.images, keys)):
        assert batch.is_contiguous()
    for name in ("ram", "cache", "gpu_slice", "prefetch"):
        found, expected = (
            next(iter(make_loader(name, split, batch_size=9, device="cpu", seed=0).epoch(0)))[0]
            for split in (train, first)
        )
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found, expected)


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


def test_files_left_out_by_their_endings_are_counted_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image that this Pillow cannot read is not left out by its ending."""
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/notes.txt", "dog/README", "eel/.hidden"):
        (folder / name).write_bytes(b"")
    (folder / "eel" / "unknown.avif").write_bytes(b"of a codec that this Pillow lacks")
    with pytest.raises(DataError, match=r"1 of 31 images cannot be read, such as:\n.*unknown\.avif"):
        load(folder, mode="grey")
    assert caplog.text.count("files left out by their endings: 1 without, 2 .heic, 1 .txt; images end in") == 1


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n damaged", None])
def test_unreadable_images_are_named_or_skipped_and_counted(
    folder: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [folder / "dog" / f"{number}.png" for number in range(6)]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    with pytest.raises(DataError, match=r"6 of 30 images cannot be read, such as:(\n.*){5}\n.*skip_un") as caught:
        load(folder)
    assert f"{folder}/dog/5.png: cannot be read as an image" in str(caught.value).replace("4.", "5.")
    for _ in range(2):  # the images are decoded the first time, and in the cache the second
        caplog.clear()
        pets = load(folder, skip_unreadable=True)
        assert "6 images cannot be read and are left out" in caplog.text
        assert (pets.skipped, len(pets.train) + len(pets.test)) == (6, 24)
        for split in (pets.train, pets.test):
            assert [CLASSES.index(name.partition("/")[0]) for name in split.files.names] == split.labels.tolist()
    with pytest.raises(DataError, match="6 of 30 images cannot be read"):
        load(folder)
    for path in folder.glob("*/*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"2\d of 30 images cannot be read, such as:(\n.*){5}\nnone is left"):
        load(folder, skip_unreadable=True)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"dog/5\.png: Too many open files"),
        (OSError(errno.EIO, "Input/output error"), r"dog/5\.png: Input/output error$"),
        (MemoryError(), ""),
    ],
)
def test_a_read_error_that_can_pass_does_not_leave_an_image_out(
    folder: Path, failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.match("dog/5.png"):
            raise failure
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises((DataError, MemoryError), match=message):
            load(folder, skip_unreadable=True)
    assert load(folder, skip_unreadable=True).skipped == 0


def test_classes_without_images_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = load(folder).train
    (folder / "ant").mkdir()
    write_image(folder / "stray.png", 0)
    write_image(folder / "bee" / "holiday" / "0.png", 0)
    (folder / "bee" / "holiday" / "0.png").write_bytes(b"")
    pets = load(folder, skip_unreadable=True)
    assert "images outside of the folders of classes are left out: stray.png" in caplog.text
    for message in ("folders without images are left out: ant", "classes without readable images are left out: bee"):
        assert message in caplog.text
    assert (pets.train.classes, pets.skipped) == (CLASSES, 1)
    assert torch.equal(pets.train.labels, before.labels)
    with pytest.raises(DataError, match="too few images for a test split"):
        load(folder, skip_unreadable=True, test_share=0.01)
    for path in folder.glob("[cd]*/*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"training images of two or more classes are expected, .* found: eel"):
        load(folder, skip_unreadable=True)
    with pytest.raises(DataError, match=r"bee: training images of two or more classes are expected.*: holiday"):
        load(folder / "bee", skip_unreadable=True)


@pytest.mark.needs("POSIX files")
def test_only_visible_regular_files_are_images_and_each_folder_is_read_once(folder: Path) -> None:
    names = load(folder).train.files.names
    for name in ("cat/loop", "cat/again", "all"):
        (folder / name).symlink_to(folder if name == "all" else folder / "cat")
    for hidden in (".ipynb_checkpoints", "holiday/.thumbnails"):
        write_image(folder / "cat" / hidden / "0.png", 0)
    (folder / "cat" / "._0.png").write_bytes(b"left by macOS with each file that it copies to a USB stick")
    os.mkfifo(folder / "cat" / "pipe.png")  # opening a FIFO waits for a writer
    (folder / "cat" / "link.png").symlink_to("pipe.png")
    (folder / "cat" / "empty.png").mkdir()
    found = load(folder)
    assert (found.train.files.names, found.skipped) == (names, 0)
    assert len(find_images([str(folder / "cat")])) == 10
    write_image(folder.parent / "linked" / "10.png", 10)
    (folder / "cat" / "linked").symlink_to("../../linked")
    assert len(find_images([str(folder / "cat")])) == 11


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
