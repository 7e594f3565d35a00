"""Normalising a batch of bytes on its device gives what torchvision gives sample by sample, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torchvision import transforms

from vitmnist.data.datasets import Dataset, Split
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.tensors import channel_statistics
from vitmnist.errors import ConfigError, DataError


@pytest.mark.parametrize("statistics", ["mnist", "random"])
def test_every_byte_becomes_what_torchvision_makes_of_it(tiny: Dataset, statistics: str) -> None:
    mean, std = ((0.1307,), (0.3081,)) if statistics == "mnist" else channel_statistics(tiny.train.images)
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    split = replace(tiny.train, mean=mean, std=std)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    assert torch.equal(Preprocess(split)(values)[0], transform(Image.fromarray(values[0, 0].numpy())))


def test_float_images_pass_and_bytes_are_not_written_to(tiny: Dataset) -> None:
    preprocess = Preprocess(tiny.train)
    images = tiny.train.images.clone()
    normalised = preprocess(images)
    assert normalised.dtype == torch.float32
    assert torch.equal(images, tiny.train.images)
    assert preprocess(normalised) is normalised


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_images_of_a_wrong_dtype_are_refused(tiny: Dataset, dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match=f"images: must be uint8, or floating point and normalised, found {dtype}"):
        Preprocess(tiny.train)(tiny.train.images.to(dtype))


class Samples(torch.utils.data.Dataset):
    """A split as a map-style data set."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.split.images[index], int(self.split.labels[index])


def test_statistics_are_the_same_from_a_split_a_pair_a_dataset_and_by_name(tiny: Dataset) -> None:
    train = tiny.train
    expected = Preprocess(train)(train.images)
    for other in (
        Preprocess((train.images, train.labels)),
        Preprocess([train.images, train.labels]),
        Preprocess(Samples(train)),
        Preprocess(mean=train.mean, std=train.std),
        Preprocess(mean=train.mean[0], std=train.std[0]),
    ):
        assert torch.equal(other(train.images), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:, 0], r"must be \[B, C, H, W\], found \[23, 28, 28\]; images.unsqueeze\(1\)"),
        (lambda images: images.permute(0, 2, 3, 1), r"found \[23, 28, 28, 1\], with the channels last; images.permute"),
        (lambda images: images.flatten(1), r"must be \[B, C, H, W\], found \[23, 784\]"),
        (lambda images: images.expand(-1, 3, -1, -1), r"3 channel\(s\) .*, but the mean and std are of 1"),
        (lambda images: images.float(), "floats from 0 to 255 are not normalised"),
        (lambda images: images / 255, "floats from 0 to 1 are not normalised"),
    ],
)
def test_images_that_the_statistics_cannot_be_right_for_are_refused(
    tiny: Dataset, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    images = change(tiny.train.images)
    with pytest.raises(DataError, match=message):
        Preprocess(tiny.train)(images)
    if images.dim() == 4 and images.shape[1] != 3:
        with pytest.raises(DataError, match="channels last" if images.dtype == torch.uint8 else "computed from uint8"):
            Preprocess((images, tiny.train.labels))


def test_floats_may_be_what_mean_and_std_make_of_0_to_1(tiny: Dataset) -> None:
    images = tiny.train.images / 255
    Preprocess(tiny.train)(torch.zeros(2, 1, 28, 28))  # a dry run
    plain = Preprocess(mean=0, std=1)
    assert plain(images) is images
    halves = images * 2 - 1
    assert Preprocess(mean=0.5, std=0.5)(halves) is halves
    bright = (128 + tiny.train.images // 2) / 255  # normalised, these too are multiples of 1/255 in 0…1
    assert Preprocess(mean=0.5, std=0.5)(bright * 2 - 1).min() >= 0
    with pytest.raises(DataError, match=r"floats from 0\.501961 to 1 are not normalised"):
        Preprocess(mean=0.5, std=0.5)(bright)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mean": 0.1},
        {"mean": 0.1, "std": 0},
        {"mean": [0.1, 0.2], "std": [1.0]},
        {"mean": [], "std": []},
        {"mean": 120, "std": 60},
        {"mean": float("nan"), "std": 1},
    ],
)
def test_statistics_that_are_none_are_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError, match="mean"):
        Preprocess(**arguments)


def test_values_are_looked_at_once_and_never_in_compiled_code(tiny: Dataset) -> None:
    """Looking at them would wait for the device in each step, and break a compiled graph."""
    preprocess = Preprocess(tiny.train)
    normalised = preprocess(tiny.train.images)
    assert torch._dynamo.explain(preprocess)(normalised).graph_break_count == 0
    with pytest.raises(DataError, match="not normalised"):
        preprocess(normalised * 9)
    preprocess(normalised)
    assert preprocess(normalised * 9).max() > 9


@pytest.mark.parametrize("label", [-1, 10])
def test_a_split_refuses_labels_that_are_no_class(tiny: Dataset, label: int) -> None:
    labels = tiny.train.labels.clone()
    labels[3] = label
    with pytest.raises(DataError, match=f"labels: must be 0 to 9, for 10 classes; label 3 is {label}"):
        replace(tiny.train, labels=labels)
