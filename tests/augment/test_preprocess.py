"""Normalising a batch of bytes on its device gives what torchvision gives sample by sample, to the last bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision import transforms

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError, DataError


@pytest.mark.parametrize("statistics", ["mnist", "random"])
def test_every_byte_is_normalised_as_in_torchvision(tiny: Dataset, statistics: str) -> None:
    mean, std = ((0.1307,), (0.3081,)) if statistics == "mnist" else compute_statistics(tiny.train.images)
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    split = replace(tiny.train, mean=mean, std=std)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    assert torch.equal(Preprocess(split)(values)[0], transform(Image.fromarray(values[0, 0].numpy())))


def test_float_images_pass_and_bytes_are_not_written_to(tiny: Dataset) -> None:
    """The dtype decides. Looking at values would wait for the device, and break a compiled graph."""
    preprocess = Preprocess(tiny.train)
    images = tiny.train.images.clone()
    normalised = preprocess(images)
    assert normalised.dtype == torch.float32
    assert torch.equal(images, tiny.train.images)
    for floats in (normalised, 9 * normalised, tiny.train.images / 255, normalised.half()):
        assert preprocess(floats) is floats
    assert torch._dynamo.explain(preprocess)(images).graph_break_count == 0


def test_images_stay_on_their_device_and_become_float32_with_any_default_dtype() -> None:
    """Images of this size are normalised in threads, into memory that is allocated before."""
    preprocess, images = Preprocess(mean=0.5, std=0.5), torch.zeros(2, 1, 256, 256, dtype=torch.uint8)
    with torch.device("meta"):  # as torch.set_default_device("cuda")
        assert torch.equal(preprocess(images), torch.full_like(images, -1, dtype=torch.float32))
    torch.set_default_dtype(torch.float64)
    try:
        assert {preprocess(part).dtype for part in (images, images[:, :, :8])} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_images_of_a_wrong_dtype_are_refused(tiny: Dataset, dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match=f"images: must be uint8, or floating point and normalised, found {dtype}"):
        Preprocess(tiny.train)(tiny.train.images.to(dtype))


def test_statistics_are_the_same_from_a_split_a_pair_and_by_name(tiny: Dataset) -> None:
    train = tiny.train
    expected = Preprocess(train)(train.images)
    for other in (
        Preprocess((train.images, train.labels)),
        Preprocess([train.images, train.labels]),
        Preprocess(mean=train.mean, std=train.std),
        Preprocess(mean=train.mean[0], std=train.std[0]),
    ):
        assert torch.equal(other(train.images), expected)
    with pytest.raises(ConfigError, match="no statistics of a map-style dataset; give mean= and std="):
        Preprocess(TensorDataset(train.images, train.labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:, 0], r"found \[23, 28, 28\]; images.unsqueeze\(1\) adds the channels"),
        (lambda images: images.permute(0, 2, 3, 1), r"found \[23, 28, 28, 1\]; .*images.permute\(0, 3, 1, 2\) puts"),
        (lambda images: images.flatten(1), r"must be \[B, 1, H, W\], because mean and std .*, found \[23, 784\]"),
        (lambda images: images.expand(-1, 3, -1, -1), r"have 1 channel\(s\), found \[23, 3, 28, 28\]"),
    ],
    ids=["no channels", "channels last", "flattened", "too many channels"],
)
def test_images_that_do_not_fit_the_statistics_are_refused(
    tiny: Dataset, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    images = change(tiny.train.images)
    with pytest.raises(DataError, match=message):
        Preprocess(tiny.train)(images)
    if images.dim() == 4 and images.shape[1] != 3:
        with pytest.raises(DataError, match=r"must be \[B, C, H, W\]"):
            Preprocess((images, tiny.train.labels))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"mean": 0.1}, {"mean": [], "std": []}, {"mean": 120, "std": 60}, {"mean": float("nan"), "std": 1}],
)
def test_impossible_statistics_are_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError, match="mean"):
        Preprocess(**arguments)


def test_a_split_refuses_labels_below_the_first_class(tiny: Dataset) -> None:
    with pytest.raises(DataError, match="labels: must be 0 to 9, found -7 to -1"):
        replace(tiny.train, labels=-1 - tiny.train.labels)
