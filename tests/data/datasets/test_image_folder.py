"""One's own pictures: found, decoded once, and named where they cannot be read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from tests.conftest import Train
from tests.support.pictures import smooth
from vitmnist import load_dataset, make_loader
from vitmnist.data.datasets import Dataset, Split, image_folder
from vitmnist.data.image_io import find_pictures, read_picture
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.tensors import channel_statistics
from vitmnist.errors import ConfigError, DataError

CLASSES = ("cat", "dog", "eel")


def draw(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (20, 14)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures of each of three classes."""
    for label, name in enumerate(CLASSES):
        for number in range(10):
            draw(tmp_path / "pictures" / name / f"{number}.png", 100 * label + number)
    return tmp_path / "pictures"


def load(folder: Path, **options: object) -> Dataset:
    return load_dataset("image_folder", root=str(folder.parent / "root"), path=str(folder), **options)


@pytest.mark.parametrize(("mode", "channels"), [("grey", 1), ("rgb", 3)])
def test_pictures_become_a_data_set(folder: Path, mode: str, channels: int) -> None:
    pets = load(folder, mode=mode, size=8)
    assert pets.name == "pictures"
    assert pets.train.classes == CLASSES
    assert (len(pets.train), len(pets.test)) == (24, 6)
    assert pets.train.images.shape == (24, channels, 8, 8)
    assert pets.train.images.dtype == torch.uint8
    assert pets.test.labels.bincount().tolist() == [2, 2, 2]
    assert (pets.train.mean, pets.train.std) == channel_statistics(pets.train.images)
    assert (pets.test.mean, pets.test.std) == (pets.train.mean, pets.train.std)


def test_a_folder_for_the_test_is_taken_as_it_is(folder: Path) -> None:
    for number, name in enumerate(CLASSES):
        (folder / "train").mkdir(exist_ok=True)
        (folder / name).rename(folder / "train" / name)
        draw(folder / "val" / name / "only.png", number)
    pets = load(folder)
    assert (len(pets.train), len(pets.test)) == (30, 3)
    (folder / "train" / "eel").rename(folder / "eel")
    (folder / "train" / "eel").mkdir()
    with pytest.raises(DataError, match="no picture in 1 of its 3 class folders: eel"):
        load(folder)
    with pytest.raises(DataError, match="val: has pictures of eel, but there are none to train on"):
        load(folder, skip_unreadable=True)
    (folder / "val" / "eel" / "only.png").unlink()
    assert load(folder, skip_unreadable=True).train.classes == ("cat", "dog")
    (folder / "val" / "eel").rmdir()
    with pytest.raises(DataError, match="differ in their classes"):
        load(folder, skip_unreadable=True)
    (folder / "val").rename(folder / "Testing")
    with pytest.raises(DataError, match="differ in their classes"):
        load(folder, skip_unreadable=True)
    (folder / "Testing").rename(folder / "exam")
    with pytest.raises(ConfigError, match=r"has a folder train with classes, but none for test; add .*/pictures/test"):
        load(folder)


def test_pictures_are_drawn_in_an_order_that_mixes_classes_and_stays(folder: Path) -> None:
    labels = load(folder).train.labels
    assert len(labels[:8].unique()) > 1
    few = load(folder, train_size=8).train
    assert torch.equal(few.labels, labels[:8])
    assert few.mean[0] == pytest.approx(float(few.images.double().mean()) / 255)
    test_before = {path.name for path in load(folder).test.reader.paths}
    draw(folder / "eel" / "new.png", 7)
    test_after = {path.name for path in load(folder).test.reader.paths}
    assert len(test_before & test_after) >= len(test_before) - 1


def test_every_loader_delivers_the_pictures(folder: Path) -> None:
    """`disk` opens the files, the others read what was decoded; to the model it is all the same."""
    for path in sorted(folder.glob("*/*.png"))[::2]:  # half of them are JPEGs of many times the size
        smooth(int(path.stem), (150, 110)).save(path.with_suffix(".jpg"))
        path.unlink()
    pets = load(folder, mode="rgb", size=8)
    full = load(folder, mode="rgb", size=8, draft=False)
    is_jpeg = torch.tensor([name.endswith(".jpg") for name in pets.train.files])
    assert torch.equal((pets.train.images != full.train.images).flatten(1).any(dim=1), is_jpeg)
    for images in (pets.train, full.train):
        check_loaders(images)


def check_loaders(train: Split) -> None:
    preprocess = Preprocess(train)
    for name, options in {"ram": {}, "gpu_slice": {}, "cache": {}, "prefetch": {}, "disk": {"num_workers": 0}}.items():
        with make_loader(name, train, batch_size=24, device="cpu", seed=0, shuffle="none", **options) as loader:
            ((images, labels),) = loader.epoch(0)
        assert torch.equal(preprocess(images), preprocess(train.images)), name
        assert torch.equal(labels, train.labels), name


def test_pictures_are_decoded_again_only_when_they_change(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        before = load(folder)
        assert caplog.text.count("decoding once") == 2  # the training and the test part
        load(folder)
        assert caplog.text.count("decoding once") == 2
        changed = before.train.reader.paths[0]
        draw(changed, 999)
        after = load(folder)
    assert caplog.text.count("decoding once") == 3
    assert not torch.equal(before.train.images[0], after.train.images[0])
    assert torch.equal(before.train.images[1:], after.train.images[1:])


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n damaged", None])
def test_an_unreadable_picture_is_named_or_skipped_and_counted(
    folder: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    broken = folder / "dog" / "3.png"
    broken.write_bytes(broken.read_bytes()[:-40] if content is None else content)
    for _ in range(2):  # decoded now, and found decoded
        with pytest.raises(
            DataError, match=rf"1 of \d+ pictures cannot be read:\n{broken}: .*\n.*skip_unreadable=true"
        ):
            load(folder)
    with caplog.at_level(logging.WARNING):
        pets = load(folder, skip_unreadable=True)
    assert pets.skipped == 1
    assert len(pets.train) + len(pets.test) == 29
    assert "1 pictures cannot be read and are left out" in caplog.text
    for split in (pets.train, pets.test):
        pictures = split.reader
        assert len(pictures.paths) == len(split)
        assert broken not in pictures.paths
        for index, label in enumerate(split.labels.tolist()):
            assert pictures.paths[index].parent.name == CLASSES[label]


def test_folders_without_enough_pictures_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="too few pictures"):
        load(folder, test_share=0.01)
    (folder / "fox").mkdir()
    with pytest.raises(DataError, match="holds no folder of a class; pictures are expected in"):
        load(folder / "fox")


def test_an_empty_class_folder_is_named_or_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "bee").mkdir()
    message = "no picture in 1 of its 4 class folders: bee"
    with pytest.raises(DataError, match=f"{message}; remove them, or type data.dataset.skip_unreadable=true"):
        load(folder)
    pets = load(folder, skip_unreadable=True)
    assert f"{message}; left out" in caplog.text
    assert pets.train.classes == CLASSES
    assert pets.test.labels.bincount().tolist() == [2, 2, 2]
    (folder / "none" / "empty").mkdir(parents=True)
    with pytest.raises(DataError, match="has one folder of a class, empty, and needs two or more"):
        load(folder / "none", skip_unreadable=True)


def test_colour_that_grey_drops_is_announced_also_when_it_is_decoded_already(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (1, 2):
        load(folder)
        message = "24 of the first 24 training pictures are in colour, which data.dataset.mode=grey drops"
        assert caplog.text.count(message) == count
    caplog.clear()
    load(folder, mode="rgb")
    for path in folder.glob("*/*"):
        Image.open(path).convert("L").convert("RGB").save(path)
    load(folder)
    assert "in colour" not in caplog.text


def test_images_know_their_files(folder: Path) -> None:
    pets = load(folder, mode="rgb", size=8, test_size=5)
    held_out = pets.held_out(4)
    for split in (pets.train, pets.test, held_out.train, held_out.test):
        assert len(split.files) == len(split)
        last = len(split) - 1
        read = read_picture(folder / split.name(last), (8, 8), "rgb")
        assert torch.equal(pil_to_tensor(read), split.images[last])
    assert (pets.eval_split, held_out.eval_split) == ("test", "held-out")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.dataset.size=30", "model.patch_size=7 does not divide the image of 30×30"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be above 0"),
        ("data.dataset.train_size=25", "data.dataset.train_size=25: the set has 24 images"),
        (
            "data/augment=shift data.augment.operations.0.pixels=28",
            "data.augment.operations.0.pixels=28: must be below the side of an image, 28",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_pictures_are_decoded(
    folder: Path, train_here: Train, tmp_path: Path, override: str, message: str
) -> None:
    root = tmp_path / "root"
    arguments = ("data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={root}")
    refused = train_here(*arguments, *override.split())
    assert message in refused.stderr
    assert not root.exists()


def test_what_could_not_be_read_for_a_while_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mended without a change of the file, as a permission is."""
    original = image_folder.read_picture

    def forbidden(path: Path, *parts: object) -> Image.Image:
        if path.name == "3.png":
            raise DataError(f"{path}: cannot be read as a picture: Permission denied")
        return original(path, *parts)

    with monkeypatch.context() as patched:
        patched.setattr(image_folder, "read_picture", forbidden)
        with pytest.raises(DataError, match="3 of 30 pictures cannot be read"):  # of both splits
            load(folder)
        assert load(folder, skip_unreadable=True).skipped == 3
    assert load(folder, skip_unreadable=True).skipped == 0


def test_all_unreadable_pictures_are_listed_in_a_file(folder: Path) -> None:
    broken = [folder / name / f"{number}.png" for name in CLASSES for number in range(3)]
    for path in broken:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"and 4 more; .* lists all") as raised:
        load(folder)
    listed = Path(str(raised.value).partition("more; ")[2].partition(" lists all")[0]).read_text().splitlines()
    assert sorted(line.partition(": cannot be read")[0] for line in listed) == sorted(map(str, broken))
    for path in folder.glob("*/*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"24 of 24 pictures cannot be read:(\n.*){5}\n… and 19 more.*\nnone is left"):
        load(folder, skip_unreadable=True)


def test_pictures_that_change_while_they_are_decoded_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, *parts: object) -> Image.Image:
        picture = read_picture(path, *parts)
        if path.name == "3.png":
            draw(path, 999, size=(9, 9))
        return picture

    with monkeypatch.context() as patched:
        patched.setattr(image_folder, "read_picture", read)
        with pytest.raises(DataError, match="pictures were changed while they were decoded; start again"):
            load(folder)
    found = load(folder)
    assert_same_pixels(found, load_dataset("image_folder", root=str(folder.parent / "other"), path=str(folder)))


def assert_same_pixels(one: Dataset, other: Dataset) -> None:
    assert torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.test.images, other.test.images)


def test_pictures_outside_of_class_folders_are_announced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw(folder / "loose.png", 0)
    with caplog.at_level(logging.WARNING):
        assert len(load(folder).train) + len(load(folder).test) == 30
    assert f"{folder}: 1 pictures are in no folder of a class and are not used: loose.png" in caplog.text
    draw(folder / "cat" / "holiday" / "0.png", 0)
    with pytest.raises(DataError, match=r"has one folder of a class, holiday, and needs two or more; its 10 pictures"):
        load(folder / "cat")  # instead of the folder above it


def test_every_class_keeps_a_picture_for_training_and_a_link_is_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    draw(folder / "rare" / "only.png", 0)
    for number in range(5):
        draw(folder / "common" / f"{number}.png", number)
    (folder / "common" / "link.png").symlink_to(folder / "common" / "0.png")
    pets = load(folder, test_share=0.6)
    assert pets.train.labels.bincount().tolist() == [2, 1]
    assert pets.test.labels.bincount().tolist() == [3]


def test_only_visible_regular_files_are_pictures_and_loops_of_links_are_followed_once(folder: Path) -> None:
    names = list(load(folder).train.files)
    for name in ("l", "m"):
        (folder / "cat" / name).symlink_to(".")
    (folder / "cat" / "._0.png").write_bytes(b"left by macOS with each file that it copies to a USB stick")
    os.mkfifo(folder / "cat" / "pipe.png")  # opening a FIFO waits for a writer
    (folder / "cat" / "link.png").symlink_to("pipe.png")
    (folder / "cat" / "empty.png").mkdir()
    found = load(folder)
    assert (list(found.train.files), found.skipped) == (names, 0)
    assert len(find_pictures([str(folder / "cat")])) == 10
    with pytest.raises(DataError, match=r"link\.png: cannot be read as a picture: not a regular file"):
        read_picture(folder / "cat" / "link.png", (8, 8), "grey")


def test_a_file_name_cannot_command_the_terminal(folder: Path) -> None:
    (folder / "cat" / "red\x1b[31m.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"red\\x1b\[31m\.png: cannot be read") as caught:
        load(folder)
    assert "\x1b" not in str(caught.value)
