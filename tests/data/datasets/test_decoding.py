"""Images are decoded once, on all cores, and again when they change. Unreadable ones are named or left out."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.image_folders import CLASSES, load, write_image
from vitmnist import make_loader
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.data.datasets import decoding
from vitmnist.data.images import ImageReader, Pixels
from vitmnist.data.sources import hash_tensor
from vitmnist.errors import ConfigError, DataError


@pytest.mark.needs("POSIX files")
def test_images_are_decoded_on_all_cores_in_the_same_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cat" / "4.png").write_bytes(b"no image")
    options = {"skip_unreadable": True, "mode": "rgb"}
    expected = load(folder, **options)
    shutil.rmtree(folder.parent / "root")
    read_image = ImageReader.__call__
    together, seen, before = threading.Barrier(3), set(), {*threading.enumerate()}

    def read(reader: ImageReader, path: Path) -> Pixels:
        thread = threading.get_ident()
        if len(seen) < 3 and thread not in seen:  # at its first image, a thread waits for the others
            seen.add(thread)
            together.wait(timeout=60)
        return read_image(reader, path)

    monkeypatch.setattr(decoding, "available_cores", lambda: 3)
    monkeypatch.setattr(ImageReader, "__call__", read)
    found = load(folder, **options)
    assert (found.sha256, found.skipped) == (expected.sha256, 1)
    assert (found.train.files, found.test.files) == (expected.train.files, expected.test.files)
    assert len(seen) == 3
    assert not {*threading.enumerate()} - before


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
