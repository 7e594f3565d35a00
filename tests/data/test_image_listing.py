"""Which files of a folder are images, of which class and split: by folders, with every omission named."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.image_folders import CLASSES, SIZES, assert_as_drawn, load, sizes, write_image
from vitmnist.data.image_listing import find_images
from vitmnist.errors import DataError


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


def test_every_folder_of_a_split_is_used_and_named(divided: Path, caplog: pytest.LogCaptureFixture) -> None:
    (divided / "notes").mkdir()
    with caplog.at_level(logging.INFO):
        pets = load(divided)
    assert_as_drawn(pets, divided)
    assert "train split from train, validation split from val, test split from test" in caplog.text
    assert "12 train and 9 validation and 6 test images of 3 classes" in caplog.text
    assert "not used: notes" in caplog.text
    small = load(divided, train_size=3, test_size=5)
    assert [len(split) for split in small.splits.values()] == [3, 9, 5]


def test_folders_of_splits_with_other_names_are_refused(divided: Path) -> None:
    for name, other in {"train": "trn", "val": "vld", "test": "tst"}.items():
        (divided / name).rename(divided / other)
    with pytest.raises(DataError, match="trn, tst, vld look like splits: each has the folders cat, dog, eel;"):
        load(divided)
    (divided / "trn").rename(divided / "train_val")
    with pytest.raises(DataError, match=r"must be one train and .* test, .*found train_val, train_val"):
        load(divided)


def test_folders_may_lack_a_split(divided: Path, caplog: pytest.LogCaptureFixture) -> None:
    (divided / "test").rename(divided.parent / "test")
    assert list(load(divided).splits) == ["train", "validation"]
    (divided / "val").rename(divided / "Testing")  # another name for it
    assert sizes(load(divided)) == {"train": 12, "test": 9}
    (divided / "Testing").rename(divided / "exam")
    with pytest.raises(DataError, match="it is unclear whether train is a split or a class next to exam; name splits"):
        load(divided)
    (divided / "exam").rename(divided.parent / "exam")
    (divided / "notes").mkdir()
    assert sizes(load(divided, test_share=0.25)) == {"train": 9, "test": 3}
    assert "not used: notes" in caplog.text
    assert sizes(load(divided, test_share=0)) == {"train": 12}


def test_folders_of_splits_may_have_longer_names_but_none_twice(divided: Path) -> None:
    for name, other in {"train": "training_set", "val": "seg_valid", "test": "test_set"}.items():
        (divided / name).rename(divided / other)
    assert sizes(load(divided)) == {"train": 12, "validation": 9, "test": 6}
    shutil.copytree(divided / "seg_valid", divided / "val")
    with pytest.raises(DataError, match=r"one train and at most one val .* found seg_valid, test_set, training_set, v"):
        load(divided)
    shutil.rmtree(divided / "training_set")
    shutil.rmtree(divided / "val")
    with pytest.raises(DataError, match=r"one train and at most one val and test, .* found seg_valid, test_set;"):
        load(divided)


def test_a_class_may_have_the_name_of_a_split_or_folders(folder: Path) -> None:
    (folder / "eel").rename(folder / "test")
    for name in ("cat/2024/0.png", "cat/2025/0.png", "dog/2024/0.png"):
        write_image(folder / name, 0)
    assert load(folder).train.classes == ("cat", "dog", "test")


def test_a_split_may_lack_a_class_but_has_no_other_and_is_not_empty(divided: Path) -> None:
    shutil.rmtree(divided / "val" / "eel")
    assert load(divided).validation.labels.bincount().tolist() == [3, 3]
    write_image(divided / "test" / "fly" / "0.png", 0)
    with pytest.raises(DataError, match="the test split has classes without training images: fly"):
        load(divided)
    shutil.rmtree(divided / "val")
    (divided / "val").mkdir()
    with pytest.raises(DataError, match=r"images: too few images for a validation split"):
        load(divided)


def test_classes_and_orders_do_not_depend_on_the_form_of_unicode(divided: Path) -> None:
    composed, decomposed = "\xc4rger", "A\u0308rger"
    for split in SIZES:
        (divided / split / "dog").rename(divided / split / "Cat")
        (divided / split / "eel").rename(divided / split / (decomposed if split == "val" else composed))
    pets = load(divided)
    assert pets.train.classes == ("Cat", "cat", composed)
    (divided / "train" / composed).rename(divided / "train" / decomposed)
    assert load(divided).train.sha256 == pets.train.sha256
