"""Mixed images, their weights and labels, and which images are partners."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from tests.support.operations import built, images, keys
from vitmnist.augment.base import derive_keys, draw_partners, random_bits
from vitmnist.augment.preprocess import Compose, Preprocess

NUMBER = 100


def mix(name: str, images: Tensor, labels: Tensor, keys: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Flip images at random, and mix them."""
    augment = Compose([{"name": "horizontal_flip"}, {"name": name}])
    return Preprocess(augment=augment, classes=classes, mean=[0] * 3, std=[1] * 3).mix_batch(images, labels, keys)


def test_mixup_matches_torchvision() -> None:
    """Images differ by at most 1e-6 if the weight is the one that was drawn for each image."""
    source, partners = images(NUMBER), images(NUMBER, seed=1)
    mixed, weights = built("mixup")(source, partners, keys(NUMBER))
    for image, partner, ours, weight in zip(source, partners, mixed, weights, strict=True):
        parameters = {"lam": float(weight), "labels": torch.zeros(2), "batch_size": 2}
        theirs = v2.MixUp(num_classes=2).transform(torch.stack([image, partner]), parameters)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_cutmix_matches_torchvision() -> None:
    """Pixels are equal. The weight is the area of the image that is left."""
    source, partners, cutmix = images(NUMBER), images(NUMBER, seed=1), built("cutmix")
    mixed, weights = cutmix(source, partners, keys(NUMBER))
    larger, is_larger = cutmix.draw_weights(keys(NUMBER), 1), random_bits(keys(NUMBER), 4) % 2 == 0
    areas = larger.where(is_larger, 1 - larger)
    rows, columns = random_bits(keys(NUMBER), 2) % 12, random_bits(keys(NUMBER), 3) % 17
    for row in range(NUMBER):
        # CutMix.make_params computes the box in this way from its random numbers.
        reach = 0.5 * math.sqrt(1 - areas[row])
        x, y, half_width, half_height = int(columns[row]), int(rows[row]), int(reach * 17), int(reach * 12)
        x1, y1 = max(x - half_width, 0), max(y - half_height, 0)
        x2, y2 = min(x + half_width, 17), min(y + half_height, 12)
        parameters = {"box": (x1, y1, x2, y2), "labels": torch.zeros(2), "batch_size": 2, "lam_adjusted": 0.5}
        own = 1 - (x2 - x1) * (y2 - y1) / (12 * 17)
        pair = [source[row], partners[row]] if own >= 0.5 else [partners[row], source[row]]
        theirs = v2.CutMix(num_classes=2).transform(torch.stack(pair), parameters)[0]
        assert torch.equal(mixed[row], theirs)
        assert float(weights[row]) == pytest.approx(max(own, 1 - own))


@pytest.mark.parametrize(
    ("alpha", "distribution"),
    [(0.5, lambda x: 2 / math.pi * x.sqrt().asin()), (1.0, lambda x: x), (2.0, lambda x: 3 * x**2 - 2 * x**3)],
    ids=["arcsine law", "uniform", "parabolic"],
)
def test_weights_follow_the_beta_distribution(alpha: float, distribution) -> None:
    weights = built("mixup", alpha=alpha).draw_weights(keys(20_000), 1).double()
    assert weights.min() >= 0.5
    assert weights.max() <= 1
    # The distribution function of a random number, applied to that number, is uniform. 1.95 / sqrt(n) is p < 0.001.
    uniform = (2 * distribution(1 - weights)).sort().values
    assert (uniform - torch.linspace(0, 1, 20_000)).abs().max() < 1.95 / math.sqrt(20_000)


@settings(max_examples=50, deadline=None)
@given(is_valid=st.lists(st.booleans(), min_size=1, max_size=12))
def test_partners_are_one_cycle_of_the_valid_images_and_padding_is_its_own(is_valid: list[bool]) -> None:
    valid = torch.tensor(is_valid)
    drawn = keys(len(is_valid)).where(valid, 0)
    partners = draw_partners(drawn, valid)
    assert torch.equal(partners[~valid], torch.arange(len(valid))[~valid])
    cycle = [int(valid.nonzero()[0])] if valid.any() else []
    while cycle and (following := int(partners[cycle[-1]])) != cycle[0]:
        cycle.append(following)
    assert sorted(cycle) == valid.nonzero().flatten().tolist()
    # Padding changes no partner.
    places = valid.nonzero().flatten()
    alone = draw_partners(drawn[valid], torch.ones(len(places), dtype=torch.bool))
    assert torch.equal(partners[valid], places[alone])


def test_partners_depend_on_the_images_of_the_batch_and_not_on_their_order() -> None:
    drawn, everything = keys(NUMBER), torch.ones(NUMBER, dtype=torch.bool)
    partner_of = dict(zip(drawn.tolist(), drawn[draw_partners(drawn, everything)].tolist(), strict=True))
    order = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(0))
    shuffled = drawn[order]
    for key, partner in zip(shuffled.tolist(), shuffled[draw_partners(shuffled, everything)].tolist(), strict=True):
        assert partner_of[key] == partner
    assert all(key != partner for key, partner in partner_of.items())


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_class_probabilities_match_the_areas_in_an_image(name: str) -> None:
    """Each image has a single value, so a mixed image shows the pair and the weight."""
    source = (torch.arange(NUMBER) / NUMBER).view(-1, 1, 1, 1).expand(NUMBER, 3, 32, 32)
    mixed, targets = mix(name, source, torch.arange(NUMBER), keys(NUMBER), NUMBER)
    assert targets.dtype == torch.float32
    torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ (torch.arange(NUMBER) / NUMBER), rtol=0, atol=1e-5)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(NUMBER))
    assert (targets.diagonal() >= 0.5).all()
    targets.fill_diagonal_(0)
    assert ((targets > 0).sum(dim=0) <= 1).all(), "each image is the partner of one"
    # An image and a partner of the same class belong to that class alone.
    _, targets = mix(name, source, torch.full((NUMBER,), 2), keys(NUMBER), 3)
    assert torch.equal(targets, torch.tensor([0.0, 0.0, 1.0]).expand(NUMBER, 3))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_padding_reaches_no_image_and_has_no_probability(name: str) -> None:
    """Padding affects neither pixels nor labels nor the choice of partners, whatever it contains."""
    source, labels = images(8), torch.arange(8)
    expected = mix(name, source[:5], labels[:5], keys(8)[:5], 8)
    labels[5:] = -100
    source[5:] = math.nan
    found = mix(name, source, labels, keys(8), 8)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[:5], theirs)
    assert not found[1][5:].any()


def test_each_operation_draws_random_numbers_of_its_own() -> None:
    drawn = keys(1000)
    columns = [random_bits(derive_keys(drawn, place), number) for place, number in ((0, 0), (0, 1), (1, 0), (2, 0))]
    for earlier, later in pairwise(columns):
        assert abs(float(torch.corrcoef(torch.stack([earlier, later]).double())[0, 1])) < 0.15
    assert torch.equal(derive_keys(drawn, 0), drawn)
