"""Validation splits drawn from the training images: a number of images, a share of each class, or folds."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Printed, result_of
from tests.support.image_folders import check_loaders, load, write_image
from vitmnist.config.schema import DataConfig
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.hold_out import hold_out_and_normalize, hold_out_validation
from vitmnist.data.images import to_tensor
from vitmnist.errors import ConfigError, DataError


def divide(dataset: Dataset, **values: Any) -> Dataset:
    keys: dict[str, Any] = {"holdout": None, "holdout_seed": 0, "normalize": "dataset"}
    return hold_out_and_normalize(dataset, DataConfig(**keys | values))


@pytest.fixture
def numbered(tiny: Dataset) -> Dataset:
    """`tiny` with three classes, sorted, and images whose pixels are the number of their row."""
    images = torch.arange(23, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    labels = torch.tensor([0] * 12 + [1] * 6 + [2] * 5)
    return replace(tiny, train=replace(tiny.train, images=images, labels=labels))


def rows(split: Split) -> list[int]:
    return split.images[:, 0, 0, 0].tolist()


def test_a_number_of_images_is_held_out_from_all_classes_of_a_sorted_dataset(numbered: Dataset) -> None:
    apart = hold_out_validation(numbered, 5, seed=0)
    assert (len(apart.train), len(apart.validation)) == (18, 5)
    assert len(apart.validation.labels.unique()) > 2
    assert sorted(rows(apart.train) + rows(apart.validation)) == [*range(23)]
    for split in (apart.train, apart.validation):
        assert split.labels.equal(numbered.train.labels[rows(split)])
    assert len({*apart.sha256.values(), *numbered.sha256.values()}) == 4 + 4
    assert apart.division == {"holdout": 5, **numbered.sha256}


def test_a_share_of_each_class_is_held_out_by_the_seed(folder: Path) -> None:
    write_image(folder / "rare" / "only.png", 1)
    pets = load(folder, mode="rgb", test_share=0.1)
    apart = hold_out_validation(pets, 0.3, seed=1)
    assert apart.validation.labels.bincount(minlength=4).tolist() == [3, 3, 3, 0]
    assert apart.train.labels.bincount().tolist() == [6, 6, 6, 1]
    assert hold_out_validation(pets, 0.9, seed=1).train.labels.bincount().tolist() == [1, 1, 1, 1]
    assert sorted([*apart.train.files.names, *apart.validation.files.names]) == sorted(pets.train.files.names)
    by_name = dict(zip(pets.train.files.names, pets.train.images, strict=True))
    for split in (apart.train, apart.validation):
        for index, name in enumerate(split.files.names):
            assert torch.equal(split.images[index], by_name[name])
            assert torch.equal(to_tensor(split.files[index]), by_name[name])
    for split in apart.splits.values():
        assert (split.mean, split.std) == compute_statistics(apart.train.images)
    check_loaders(apart.train.subset(slice(24)))
    assert apart.validation.files != hold_out_validation(pets, 0.3, seed=2).validation.files


def test_each_image_is_in_one_fold_and_each_class_in_all(numbered: Dataset) -> None:
    parts = [divide(numbered, folds=4, fold=fold) for fold in range(4)]
    for part in parts:
        assert sorted(rows(part.train) + rows(part.validation)) == [*range(23)]
        assert part.train.mean == part.validation.mean != numbered.train.mean
        assert part.division == {"folds": 4, **numbered.sha256}
    assert sorted(row for part in parts for row in rows(part.validation)) == [*range(23)]
    assert sorted(len(part.validation) for part in parts) == [5, 6, 6, 6]
    counts = torch.stack([part.validation.labels.bincount(minlength=3) for part in parts])
    assert (counts.amax(0) - counts.amin(0)).tolist() == [0, 1, 1]
    assert divide(numbered, folds=4, fold=0, holdout_seed=1).sha256 != parts[0].sha256


def test_the_held_out_rows_of_a_published_seed_never_change(numbered: Dataset) -> None:
    """Published validation accuracies can only be repeated with the same split."""
    settings: list[dict[str, Any]] = [{"holdout": 5}, {"holdout": 0.3}, {"folds": 4, "fold": 1}]
    held_out = [rows(divide(numbered, holdout_seed=42, **values).validation) for values in settings]
    assert held_out == [[2, 6, 8, 16, 17], [1, 6, 7, 8, 13, 16, 18, 22], [4, 6, 11, 13, 17, 22]]


def test_a_table_has_the_folds(tmp_path: Path) -> None:
    folds = ["1", "2.0", "1", "", "2", "1"]
    rows = [f"{label}/{index}.png,{label},{fold}" for label in ("cat", "dog") for index, fold in enumerate(folds)]
    for number, row in enumerate(rows):
        write_image(tmp_path / "images" / row.split(",")[0], number)
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["file,label,fold", *rows]))
    load_table = partial(load, tmp_path / "images", labels=str(table))
    part = divide(load_table(), fold=2)
    assert sorted(part.validation.files.names) == ["cat/1.png", "cat/4.png", "dog/1.png", "dog/4.png"]
    assert len(part.train) == 8
    assert part.test is None  # The images of a fold belong together, so none are drawn for a test split.
    assert len(load_table(columns={"fold": None}).test) == 2
    with pytest.raises(ConfigError, match=r"data\.holdout=0\.3: would divide folds of the table"):
        hold_out_validation(load_table(), 0.3, seed=0)
    with pytest.raises(ConfigError, match=r"data\.fold=0: data\.fold must be one of 1, 2"):
        divide(load_table(), fold=0)
    assert len(divide(load_table(), folds=2, fold=0).validation) == 6
    with pytest.raises(ConfigError, match="there are no folds"):
        divide(load_table(columns={"fold": None}), fold=1)
    with pytest.raises(DataError, match="has no column part"):
        load_table(columns={"fold": "part"})
    table.write_text(table.read_text().replace(",2.0", ",b"))
    with pytest.raises(DataError, match=r"labels\.csv:3: fold=b: must be a whole number"):
        load_table()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"holdout": 23}, "data.holdout=23: leaves none of the 23 training images"),
        ({"holdout": 0.01}, "data.holdout=0.01: no class has enough of the 23 training images"),
        ({"holdout": 1.5}, "data.holdout=1.5: must be a number of images above 1, or a share below 1"),
        ({"folds": 3, "fold": 3}, "data.fold=3: data.fold must be one of 0, 1, 2"),
        ({"folds": 3}, "data.folds=3 data.fold=null: data.fold must be one of 0, 1, 2; -m trains several"),
        ({"fold": 0}, "there are no folds; set data.folds=5, or give a table of labels a column of folds"),
        ({"folds": 3, "fold": 0, "holdout": 0.1}, "data.holdout=0.1 draws another validation split"),
    ],
)
def test_a_division_that_cannot_be_made_is_refused(values: dict[str, Any], message: str, tiny: Dataset) -> None:
    with pytest.raises(ConfigError, match=message):
        divide(tiny, **values)


@pytest.mark.parametrize("values", [{"holdout": 5}, {"folds": 3, "fold": 0}])
def test_an_existing_validation_split_is_not_replaced(values: dict[str, Any], tiny: Dataset) -> None:
    unset = " ".join(f"data.{key}=null" for key in values)
    with pytest.raises(ConfigError, match=f"has a validation split of 7 images; set {unset}$"):
        divide(replace(tiny, validation=tiny.test), **values)


def test_a_sweep_over_folds_ends_in_mean_and_deviation(quick: list[str], succeed: Printed, tmp_path: Path) -> None:
    printed = succeed("-m", *quick, "data.folds=3", "data.fold=range(3)", "epochs=1", "hydra.sweep.dir=here")
    runs = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-2]-*"))]
    assert [run["config"]["data"]["fold"] for run in runs] == [0, 1, 2]
    assert len({run["dataset"]["sha256"]["validation_images"] for run in runs}) == 3
    assert len({run["dataset"]["validation_size"] for run in runs}) == 2
    mean = sum(run["epochs"][-1]["eval_acc"] for run in runs) / 3
    assert f"Validation accuracy: {mean:.2f}% ± " in printed
    assert "(mean ± sd over 3 folds)." in printed
