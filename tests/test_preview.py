"""The preview of an augmentation, as its users start it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.conftest import CallHere
from vitmnist.augment.compose import Compose
from vitmnist.augment.preprocess import Preprocess
from vitmnist.cli.preview import main
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler


def test_originals_and_augmented_are_shown(call_here: CallHere, tiny_root: Path, tiny: Dataset, tmp_path: Path) -> None:
    ended = call_here(main, "data/augment=shift", "data/dataset=kmnist", f"data.root={tiny_root}", "seed=5")
    assert (ended.returncode, ended.stdout) == (0, "outputs/preview.png\n")
    picture = np.asarray(Image.open(tmp_path / "outputs" / "preview.png"))
    side = 4 * 28  # enlarged
    assert picture.shape == (8 * (side + 2), 8 * (side + 2), 3)
    preprocess = Preprocess(tiny.train, Compose([{"name": "shift", "pixels": 2}]))
    sampler = EpochSampler(23, 23, 5, "none")
    for column in (0, 1, 7):
        keys = next(preprocess.keys(sampler, column - 1)) if column else None
        seen = preprocess(tiny.train.images, keys) * preprocess.std + preprocess.mean
        for row in (0, 7):
            top, left = row * (side + 2) + 1, column * (side + 2) + 1
            shown = picture[top : top + side : 4, left : left + side : 4, 0]
            assert np.array_equal(shown, (seen[row, 0] * 255).round().to(torch.uint8).numpy())


def test_mixed_images_are_shown_mixed(call_here: CallHere, tiny_root: Path, tmp_path: Path) -> None:
    operations = "data.augment.operations=[{name: mixup, alpha: 10}]"
    file = tmp_path / "folder" / "mixed.png"
    arguments = ("data/augment=compose", operations, "data/dataset=kmnist", f"data.root={tiny_root}")
    ended = call_here(main, *arguments, "--output", str(file))
    assert ended.stdout == "folder/mixed.png\n"
    picture = np.asarray(Image.open(file)).astype(int)
    # Black or white pixels of the noise of the dataset are rare in averages.
    assert picture[:, 1:113].std() > 1.2 * picture[:, 115:227].std()
