"""Augmentation depends on the seed, the epoch and the image's index alone, and does what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as TF

from vitmnist import make_loader
from vitmnist.data.augment import Compose, augment_keys
from vitmnist.data.augment.keys import _mix64
from vitmnist.data.datasets import Dataset
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler

CPU = torch.device("cpu")
BLACK = torch.full((2, 1, 1), -0.5)
LOADERS_COMPARED = {
    "gpu_slice": {},
    "ram": {},
    "prefetch": {},
    "disk": {"num_workers": 2},
}


def augment(name: str, **options: float) -> Compose:
    return Compose([{"name": name, **options}])


def keys(number: int, seed: int = 0, epoch: int = 0) -> Tensor:
    return augment_keys(EpochSampler(number, number, seed, "none"), epoch, CPU)


def pictures(number: int, height: int = 6, width: int = 9) -> Tensor:
    return torch.rand(number, 2, height, width, generator=torch.Generator().manual_seed(1))


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The generator's first outputs for seed 1234567, as published with its reference implementation."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * step) % 2**64 for step in (1, 2, 3)]
    found = _mix64(torch.tensor([state - 2**64 if state >= 2**63 else state for state in states]))
    assert [value % 2**64 for value in found.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("name", ["shift", "affine"])
@pytest.mark.parametrize("shuffle", ["sample", "batch"])
def test_every_loader_gets_the_same_augmented_images(tiny: Dataset, name: str, shuffle: str) -> None:
    preprocess = Preprocess(tiny.train, augment(name))
    epochs = []
    for loader_name, options in LOADERS_COMPARED.items():
        with make_loader(
            loader_name, tiny.train, batch_size=5, device="cpu", seed=3, shuffle=shuffle, **options
        ) as loader:
            batches = zip(loader.epoch(1), preprocess.keys(loader.sampler, 1), strict=True)
            epochs.append(torch.cat([preprocess(images, keys) for (images, _), keys in batches]))
    assert all(torch.equal(epoch, epochs[0]) for epoch in epochs[1:])
    assert not torch.equal(
        epochs[0], Preprocess(tiny.train)(tiny.train.images[EpochSampler(23, 5, 3, shuffle).indices(1)])
    )


def test_an_images_number_does_not_depend_on_its_batch() -> None:
    """Neither on the batch size nor on the order."""
    by_index = []
    for batch_size, shuffle in ((1, "none"), (4, "sample"), (7, "batch")):
        sampler = EpochSampler(20, batch_size, 5, shuffle)
        numbers = torch.empty(20, dtype=torch.int64)
        numbers[sampler.indices(2)] = augment_keys(sampler, 2, CPU)
        by_index.append(numbers)
    assert torch.equal(by_index[0], by_index[1])
    assert torch.equal(by_index[0], by_index[2])


def test_each_image_epoch_and_seed_has_another_number() -> None:
    found = torch.cat([keys(1000, seed, epoch) for seed in range(4) for epoch in range(4)])
    assert len(found.unique()) == 16_000


def test_shift_moves_whole_images_evenly_and_fills_with_black() -> None:
    images = pictures(20_000)
    moved = augment("shift", pixels=1)(images, keys(20_000), BLACK)
    framed = torch.nn.functional.pad(images + 0.5, (1, 1, 1, 1)) - 0.5
    taken = torch.zeros(3, 3, dtype=torch.int64)
    for down in range(3):
        for right in range(3):
            window = framed[:, :, down : down + 6, right : right + 9]
            taken[down, right] = ((window - moved).abs().amax(dim=(1, 2, 3)) < 1e-6).sum()
    assert taken.sum() == 20_000
    # Evenly: a ninth each, within five standard deviations.
    assert (taken - 20_000 / 9).abs().max() < 5 * math.sqrt(20_000 * 8 / 81)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (20, 32)])
def test_affine_turns_as_torchvision_does(height: int, width: int) -> None:
    """About the centre and without a shear, also where an image is not square."""
    images = pictures(3, height, width)
    turned = augment("affine", degrees=30, pixels=0, scale=0, shear_degrees=0)(images, keys(3), BLACK)
    angles = torch.linspace(-30, 30, 601)
    for image, found in zip(images, turned, strict=True):
        candidates = torch.stack(
            [TF.rotate(image, float(angle), TF.InterpolationMode.BILINEAR, fill=[-0.5, -0.5]) for angle in angles]
        )
        # Inside: torchvision fills the rim in one step, we blend into it.
        inside = (slice(None), slice(8, -8), slice(8, -8))
        assert min((candidate[inside] - found[inside]).abs().max() for candidate in candidates) < 0.05


def test_affine_stays_within_its_bounds() -> None:
    """A spot in the centre moves by `pixels` at most."""
    spots = torch.full((500, 2, 21, 21), -0.5)
    spots[:, :, 10, 10] = 1.0
    moved = augment("affine", degrees=0, pixels=2, scale=0, shear_degrees=0)(spots, keys(500), BLACK)
    light = (moved[:, 0] + 0.5).clamp(min=0)
    for dim in (1, 2):
        centre = (light.sum(dim=3 - dim) * torch.arange(21)).sum(dim=1) / light.sum(dim=(1, 2)) - 10
        assert 1.9 < centre.abs().max() <= 2.001
        assert abs(centre.mean()) < 0.3


STILL = {"shift": {"pixels": 0}, "affine": {"degrees": 0, "pixels": 0, "scale": 0, "shear_degrees": 0}}


@pytest.mark.parametrize("name", ["shift", "affine"])
def test_the_batch_itself_and_images_without_keys_are_left_alone(tiny: Dataset, name: str) -> None:
    """The latter are those of an evaluation."""
    images = Preprocess(tiny.train)(tiny.train.images)
    before = images.clone()
    preprocess = Preprocess(tiny.train, augment(name))
    preprocess(images, keys(23))
    assert torch.equal(images, before)
    assert torch.equal(preprocess(tiny.train.images), before)
    still = Preprocess(tiny.train, augment(name, **STILL[name]))
    assert torch.allclose(still(images, keys(23)), images, atol=1e-5)
