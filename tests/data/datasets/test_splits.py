"""Which images are for training, validation and test: folders and tables of labels."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import CallHere, Printed, Train, result_of
from tests.support.image_folders import CLASSES, check_loaders, load, overrides, write_image
from vitmnist.cli.evaluate import main as evaluate_main
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.images import to_tensor
from vitmnist.errors import ConfigError, DataError

COMPOSED, DECOMPOSED = "\xc4rger", "A\u0308rger"
SIZES = {"train": 4, "val": 3, "test": 2}  # images of each class


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    """A folder with `train/`, `val/` and `test/`."""
    for number, (split, size) in enumerate(SIZES.items()):
        for label, name in enumerate(CLASSES):
            for index in range(size):
                write_image(tmp_path / "images" / split / name / f"{index}.png", 100 * number + 10 * label + index)
    return tmp_path / "images"


def table(folder: Path, columns: str = "file,label,split") -> list[str]:
    """The lines of a CSV file of all images of a folder."""
    rows = [columns]
    for path in sorted(folder.rglob("*.png")):
        name = path.relative_to(folder)
        cells = {"file": str(name), "label": path.parent.name, "split": name.parts[0]}
        rows.append(",".join(cells[column] for column in columns.split(",")))
    return rows


def sizes(dataset: Dataset) -> dict[str, int]:
    return {name: len(split) for name, split in dataset.splits.items()}


def assert_as_drawn(dataset: Dataset, folder: Path) -> None:
    """Every image of `divided` is in its split, with its label and pixels."""
    assert sizes(dataset) == {"train": 12, "validation": 9, "test": 6}
    for name, split in dataset.splits.items():
        names = split.files.names
        assert {Path(file).parts[0] for file in names} == {"val" if name == "validation" else name}
        assert [dataset.train.classes[label] for label in split.labels] == [Path(file).parts[1] for file in names]
        for index in (0, len(split) - 1):
            assert torch.equal(to_tensor(split.files[index]), split.images[index])
        assert (split.mean, split.std) == compute_statistics(dataset.train.images)


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


def test_a_table_of_labels_replaces_folders(divided: Path) -> None:
    labels = divided.parent / "labels.csv"
    labels.write_text("\ufeff" + "\n".join(table(divided)))  # as spreadsheets write it
    assert_as_drawn(load(divided, labels=str(labels)), divided)
    rows = table(divided, "label,file")
    labels.write_text("\n".join([rows[0], *(row.replace("eel", "Aal", 1) for row in rows[1:])]))
    pets = load(divided, labels=str(labels), test_share=0.34)
    assert pets.train.classes == ("Aal", "cat", "dog")
    assert sizes(pets) == {"train": 18, "test": 9}
    check_loaders(load(divided, labels=str(labels), test_share=0.1).train.subset(slice(24)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("file,", "path,"), r"labels\.csv:1: has no column file, only path, label, split; .*columns='{file: NAME"),
        (("train/cat/0.png,cat,train", "train/cat/0.png,,train"), r":\d+: has no value in the column label"),
        (("train/cat/0.png,cat,train", ",cat,train"), r":\d+: has no value in the column file"),
        (("0.png,cat,train", "0.png,cat,exam"), r":\d+: split=exam: must be train, val or test"),
        (("train/cat/0.png", "train/cat/no.png"), r"no\.png: cannot be read as an image: No such file"),
        (("train/cat/0.png", "train/cat/1.png"), r":\d+: train/cat/1\.png is in an earlier line too"),
        (("train/cat/0.png", "train/../../cat.png"), r":\d+: train.*cat\.png: must be below data\.dataset\.path"),
        (("train/cat/0.png", "/etc/hosts"), r":\d+: /etc/hosts: must be below data\.dataset\.path"),
        (("cat/0.png,cat,tr", "cat/0.png,cat, wild,tr"), r":\d+: has more fields than the header; quote values"),
        (("test/eel/0.png,eel", "test/eel/0.png,fly"), "the test split has classes .*: fly"),
    ],
)
def test_errors_of_a_table_name_its_line(divided: Path, change: tuple[str, str], message: str) -> None:
    labels = divided.parent / "labels.csv"
    text = "\n".join(table(divided))
    assert change[0] in text
    labels.write_text(text.replace(*change))
    with pytest.raises(DataError, match=message) as caught:
        load(divided, labels=str(labels))
    number = next((n for n, line in enumerate(text.splitlines(), 1) if change[0] in line), 0)
    assert r":\d+: " not in message or f"labels.csv:{number}: " in str(caught.value) or "earlier" in message
    if "No such file" in message:
        assert load(divided, labels=str(labels), skip_unreadable=True).skipped == 1
    for content in (b"file,label\n\xff\xfe,cat", b"", None):
        labels.unlink() if content is None else labels.write_bytes(content)
        with pytest.raises(DataError, match=r"labels\.csv"):
            load(divided, labels=str(labels))


def test_tables_of_other_programs_are_read(divided: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tables have other column names, files without endings, absolute paths, and names that macOS has decomposed."""
    for label in ("cat", "eel"):
        (divided / f"train/{label}/0.png").rename(divided / f"train/{label}/{DECOMPOSED}.png")
    hidden = divided / "train" / "cat" / ".hidden.png"
    (divided / "train" / "cat" / "1.png").rename(hidden)
    labels = divided.parent / "labels.csv"
    rows = [row.replace(".png", "").replace(DECOMPOSED, COMPOSED) for row in table(divided)[1:]]
    rows = [str(divided / row) + ",3" if row.startswith("train/dog") else f"{row},3" for row in rows]
    rows = [" , ".join(row.split(",")) for row in rows[::2]] + rows[1::2]  # blanks around values are ignored
    labels.write_text("\n".join(["image_id, target ,split,part,,", *rows]))
    columns = {"file": "image_id", "label": "target"}
    assert_as_drawn(load(divided, labels=str(labels), columns=columns, suffix=".png"), divided)
    assert "labels.csv: columns that are not used: 'part'" in caplog.text
    labels.write_text(labels.read_text() + f"\ntrain/cat/{DECOMPOSED},cat,train,3")
    with pytest.raises(DataError, match="is in an earlier line too"):
        load(divided, labels=str(labels), columns=columns, suffix=".png")
    with pytest.raises(DataError, match="has no column other, only image_id"):
        load(divided, labels=str(labels), columns={**columns, "split": "other"})
    with pytest.raises(ConfigError, match=r"columns\.lable: there is no such key"):
        load(divided, labels=str(labels), columns={"lable": "target"})


def test_classes_and_orders_do_not_depend_on_the_form_of_unicode(divided: Path) -> None:
    for split in SIZES:
        (divided / split / "dog").rename(divided / split / "Cat")
        (divided / split / "eel").rename(divided / split / (DECOMPOSED if split == "val" else COMPOSED))
    pets = load(divided)
    assert pets.train.classes == ("Cat", "cat", COMPOSED)
    (divided / "train" / COMPOSED).rename(divided / "train" / DECOMPOSED)
    assert load(divided).train.sha256 == pets.train.sha256


def test_epochs_are_evaluated_on_val_and_the_test_split_once(
    divided: Path, train_here: Train, refuse: Printed, tmp_path: Path
) -> None:
    data = [*overrides(divided), "model=cnn"]
    ended = train_here(*data, "epochs=2", "hydra.run.dir=run")
    assert ended.returncode == 0, ended.stderr
    assert "evaluated on the validation split, 9 images" in ended.stdout
    result = result_of(tmp_path / "run")
    assert (result["eval_split"], result["test"]["weights"]) == ("validation", "best")
    assert [result["dataset"][f"{key}_size"] for key in ("train", "validation", "test")] == [12, 9, 6]
    assert "the dataset has a validation split of 9 images" in refuse(*data, "data.holdout=2")
    shutil.rmtree(divided / "val")
    shutil.rmtree(divided / "test")
    alone = [*data, "data.dataset.test_share=0", "epochs=1"]
    assert "images: has neither validation nor test images; set data.holdout=0.1" in refuse(*alone)
    ended = train_here(*alone, "data.holdout=0.25", "hydra.run.dir=alone")
    assert ended.returncode == 0, ended.stderr
    assert (result_of(tmp_path / "alone")["eval_split"], result_of(tmp_path / "alone")["test"]) == ("validation", None)


def test_another_folder_is_evaluated_as_the_user_says(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    data = [*overrides(folder), "model=cnn"]
    parts = ["data.dataset.train_size=20", "data.dataset.test_size=4", "data.holdout=5"]
    assert train_here(*data, *parts, "epochs=1", "hydra.run.dir=run").returncode == 0
    for name in CLASSES:
        write_image(tmp_path / "other" / name / "only.png", 5)
        write_image(tmp_path / "other" / name / "second.png", 6)
    (tmp_path / "table.csv").write_text("\n".join(table(folder, "file,label")))
    division = "data.holdout={} data.dataset.train_size={} data.dataset.test_size={} data.dataset.test_share={}"
    undivided, as_trained = division.format("null", "null", "null", 0), division.format(5, 20, 4, 0.2)
    for other, images, split in (
        ([], 5, "validation"),
        (["data.dataset.path=other", *undivided.split()], 6, "all"),
        (["data.dataset.path=other", *undivided.split(), "data.dataset.test_share=0.5"], 3, "test"),
        (["data.dataset.labels=table.csv", *as_trained.split()], 5, "validation"),
    ):
        ended = call_here(evaluate_main, "run", "--json", data[2], *other)
        printed = json.loads(ended.stdout.splitlines()[-1])
        assert (printed["images"], printed["split"]) == (images, split)
    ended = call_here(evaluate_main, "run", data[2], "data.dataset.path=other")
    assert ended.returncode == 1
    assert f"another path; set {undivided} to evaluate all of these images, or {as_trained} to divide" in ended.stderr


@pytest.mark.needs("POSIX files")
def test_the_images_of_a_run_keep_their_splits_at_any_path(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    """No training image is evaluated, whether the path is written in another way, or the folder was moved."""
    _, _, root = overrides(folder)
    parts = ["data.holdout=5", "data.dataset.train_size=20", "data.dataset.test_size=4"]
    typed = ["data/dataset=image_folder", "data.dataset.path=images", root, *parts]
    assert train_here(*typed, "model=cnn", "epochs=1", "hydra.run.dir=run").returncode == 0

    def evaluated(path: object, *options: str) -> list[str]:
        typed = ["run", root, f"data.dataset.path={path}", *options, "--json", "--predictions"]
        ended = call_here(evaluate_main, *typed)
        assert ("split have changed since training" in ended.stderr) == is_changed
        return [row["image"] for row in json.loads(ended.stdout.splitlines()[-1])["predictions"]]

    is_changed = False
    expected = evaluated("images")
    (tmp_path / "link").symlink_to("images")
    for path in ("./images", folder, "link"):
        assert evaluated(path) == expected
    folder.rename(tmp_path / "moved")
    assert evaluated("moved", "data.dataset.test_share=0.2", *parts) == expected
    for number in range(10):
        write_image(tmp_path / "moved" / "cat" / f"{number}.png", 1000 + number)
    is_changed = True
    assert evaluated("moved", "data.dataset.test_share=0.2", *parts) == expected
    (tmp_path / "moved").rename(folder)
    assert evaluated("./images") == expected
