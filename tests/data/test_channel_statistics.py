"""Channel statistics that are given instead of those of the training images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Printed
from vitmnist import make_loader
from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import DataConfig
from vitmnist.data.channel_statistics import compute_statistics, resolve_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.hold_out import hold_out_and_normalize
from vitmnist.errors import ConfigError
from vitmnist.inference.trained_model import load_model


def test_configured_statistics_are_used_by_every_split_and_loader(tiny: Dataset) -> None:
    own = {"mean": [0.25], "std": [0.5]}
    dataset = hold_out_and_normalize(tiny, DataConfig(holdout=5, holdout_seed=0, normalize=own))
    assert list(dataset.splits) == ["train", "validation", "test"]
    for split in dataset.splits.values():
        assert (split.mean, split.std) == ((0.25,), (0.5,))
    expected = (dataset.train.images.float() / 255 - 0.25) / 0.5
    torch.testing.assert_close(Preprocess(dataset.train)(dataset.train.images), expected)
    with make_loader("disk", dataset.train, batch_size=18, device="cpu", seed=0, shuffle="none", num_workers=0) as disk:
        ((images, _),) = disk.epoch(0)
    assert torch.equal(images, Preprocess(dataset.train)(dataset.train.images))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cifar", r"data\.normalize=cifar: must be dataset, imagenet, or \{mean: \[\.\.\], std: \[\.\.\]\}"),
        (0.5, r"data\.normalize=0\.5: must be dataset"),
        ("imagenet", r"data\.normalize=imagenet: has 3 means, and the images have 1 channels"),
        ({"mean": [0.5]}, r"data\.normalize\.std is missing"),
        ({"mean": 0.5, "std": 0.5}, r"data\.normalize\.mean"),
        ({"mean": [0.5], "std": [0.5], "var": 1}, r"data\.normalize\.var: there is no such key"),
        ({"mean": [0.5], "std": [0.0]}, "must be a mean and a deviation per channel, of images scaled to 0…1"),
        ({"mean": [127], "std": [60]}, "must be a mean and a deviation per channel, of images scaled to 0…1"),
        (
            {"mean": [0.5], "std": [0.5, 0.5]},
            r"data\.normalize: has the means \[0\.5\] and the deviations \[0\.5, 0\.5\]; must be a mean",
        ),
    ],
)
def test_statistics_that_cannot_be_used_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_statistics(value, 1)


def test_statistics_are_typed_recorded_and_may_not_change(
    quick: list[str], succeed: Printed, refuse: Printed, tmp_path: Path
) -> None:
    typed = "data.normalize={mean:[0.25],std:[0.5]}"
    succeed(*quick, typed, "epochs=1", "hydra.run.dir=run")
    model = load_model(tmp_path / "run", device="cpu")
    assert [model.preprocess.mean.item(), model.preprocess.std.item()] == [0.25, 0.5]
    succeed("resume=run", "epochs=2")
    assert "data.normalize.std=[0.4] (it was [0.5])" in refuse("resume=run", "data.normalize.std=[0.4]")


def test_statistics_match_their_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2345, 3, 50, 4), generator=generator, dtype=torch.uint8)  # several chunks
    images[:, 2] = 9
    mean, std = compute_statistics(images)
    scaled = images.double() / 255
    assert torch.tensor(mean).allclose(scaled.mean(dim=(0, 2, 3)).float())
    assert torch.tensor(std[:2]).allclose(scaled.std(dim=(0, 2, 3), unbiased=False)[:2].float())
    assert std[2] == 1 / 255
