"""Splits and datasets: their sizes and dtypes are checked, and `load_dataset` reads one by name."""

from pathlib import Path

import pytest
import torch

from vitmnist import load_dataset
from vitmnist.data.datasets.base import Split, get_image_reader
from vitmnist.data.images import ColorMode, ImageReader
from vitmnist.errors import ConfigError, DataError


def test_load_dataset_reads_a_dataset_by_name(tiny_root: Path) -> None:
    kmnist = load_dataset("kmnist", root=str(tiny_root), train_size=5)
    assert (len(kmnist.train), len(kmnist.test)) == (5, 7)
    with pytest.raises(ConfigError, match=r"^name=kmnits: not known; did you mean 'kmnist'\?"):
        load_dataset("kmnits")
    with pytest.raises(ConfigError, match=r"^train_sise: there is no such key; did you mean 'train_size'\?"):
        load_dataset("kmnist", train_sise=3)


def test_a_split_of_the_wrong_dtype_shape_or_classes_is_refused() -> None:
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    for values, message in (
        ((images.float(), labels), "images: must be uint8"),
        ((images[:, 0], labels), r"found torch.uint8 \[3, 4, 4\]"),
        ((images, labels.float()), "labels: must be int64 .*, one per image"),
        ((images, labels - 7), "labels: must be 0 to 0, found -7 to -7"),
        ((images, torch.zeros(3, 20)), r"float32 \[3, 20\]; .* one-hot; for several labels or masks .*from_dataloader"),
        ((images, torch.zeros(3, 4, 4, dtype=torch.int64)), r"int64 \[3, 4, 4\]; .* or masks keep your own training"),
    ):
        with pytest.raises(DataError, match=message):
            Split(*values, (0.5,), (0.5,), ("only",))


def test_a_dataset_without_files_of_its_own_reads_any_image_in_its_shape() -> None:
    assert get_image_reader({"name": "mnist"}, (1, 20, 30)) == ImageReader((20, 30), ColorMode.grey)
    recorded = {"name": "image_folder", "size": 9, "mode": "rgb", "resize": "pad", "draft": False}
    assert get_image_reader(recorded, (3, 9, 9)) == ImageReader((9, 9), "rgb", "pad")
