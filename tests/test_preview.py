"""The preview of an augmentation, as its users start it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.conftest import CallHere
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.cli.preview import main
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler


@pytest.mark.parametrize("operation", ["{name: shift, pixels: 2}", "{name: mixup, alpha: 10}"])
def test_originals_and_what_the_model_sees_of_them_are_shown(
    operation: str, call_here: CallHere, tiny_root: Path, tiny: Dataset, tmp_path: Path
) -> None:
    typed = ["data/augment=compose", f"data.augment.operations=[{operation}]", "data/dataset=kmnist", "seed=5"]
    ended = call_here(main, *typed, f"data.root={tiny_root}")
    assert (ended.returncode, ended.stdout) == (0, "outputs/preview.png\n")
    picture = np.asarray(Image.open(tmp_path / "outputs" / "preview.png"))
    side = 4 * 28  # enlarged
    assert picture.shape == (8 * (side + 2), 8 * (side + 2), 3)
    preprocess = Preprocess(tiny.train, Compose([yaml.safe_load(operation)]))
    sampler, images, labels = EpochSampler(23, 8, 5, "none"), tiny.train.images[:8], tiny.train.labels[:8]
    for column in (0, 1, 7):
        keys = next(preprocess.keys(sampler, column - 1)) if column else None
        mixes = preprocess.mixes and keys is not None
        seen = preprocess.mixed(images, labels, keys)[0] if mixes else preprocess(images, keys)
        pixels = ((seen * preprocess.std + preprocess.mean) * 255).round().to(torch.uint8)
        for row in (0, 7):
            top, left = row * (side + 2) + 1, column * (side + 2) + 1
            shown = picture[top : top + side : 4, left : left + side : 4, 0]
            assert np.array_equal(shown, pixels[row, 0].numpy())
