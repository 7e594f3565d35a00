"""Boxes, random numbers and partners: drawn by keys, which depend on seed, epoch and index alone."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.operations import keys
from vitmnist.augment.base import _mix64, derive_keys, draw_boxes, draw_keys, draw_partners, random_bits
from vitmnist.data.sampler import EpochSampler


def test_boxes_have_the_configured_areas_and_shapes_and_lie_anywhere() -> None:
    boxes = draw_boxes(keys(5000), (0.1, 0.4), (0.5, 1.5), 200, 300)
    heights, widths = (boxes.bottom - boxes.top).double(), (boxes.right - boxes.left).double()
    areas, ratios = heights * widths / 60_000, widths / heights
    assert 0.095 < areas.min() < 0.12
    assert 0.38 < areas.max() < 0.405
    assert areas.mean() == pytest.approx(0.25, abs=0.01)
    assert 0.49 < ratios.min() < 0.52
    assert 1.48 < ratios.max() < 1.52
    assert ratios.log().mean() == pytest.approx((math.log(0.5) + math.log(1.5)) / 2, abs=0.02)
    for first, end, side in ((boxes.top, boxes.bottom, 200), (boxes.left, boxes.right, 300)):
        assert first.min() == 0
        assert end.max() == side
        room = side - (end - first)
        assert (first[room > 0] / room[room > 0]).mean() == pytest.approx(0.5, abs=0.02)


def test_random_numbers_match_splitmix64() -> None:
    """These are the first outputs for seed 1234567, as published with the reference implementation."""
    states = [(1234567 + 0x9E3779B97F4A7C15 * step) % 2**64 for step in (1, 2, 3)]
    found = _mix64(torch.tensor([state - 2**64 if state >= 2**63 else state for state in states]))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in found.tolist()] == published


def by_index(batch_size: int, shuffle: str, seed: int = 5, epoch: int = 2) -> Tensor:
    sampler = EpochSampler(1000, batch_size, seed, shuffle)
    numbers = torch.empty(1000, dtype=torch.int64)
    numbers[sampler.sample_ids(epoch)] = draw_keys(sampler, epoch, torch.device("cpu"))
    return numbers


def test_an_images_number_depends_on_seed_epoch_and_index_and_not_on_its_batch() -> None:
    """The number depends neither on the batch size nor on the order."""
    expected = by_index(1, "none")
    assert torch.equal(by_index(4, "sample"), expected)
    assert torch.equal(by_index(7, "batch"), expected)
    found = torch.cat([by_index(1000, "none", seed, epoch) for seed in range(4) for epoch in range(4)])
    assert len(found.unique()) == 16_000


NUMBER = 100


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


def test_each_operation_draws_random_numbers_of_its_own() -> None:
    drawn = keys(1000)
    columns = [random_bits(derive_keys(drawn, place), number) for place, number in ((0, 0), (0, 1), (1, 0), (2, 0))]
    for earlier, later in pairwise(columns):
        assert abs(float(torch.corrcoef(torch.stack([earlier, later]).double())[0, 1])) < 0.15
    assert torch.equal(derive_keys(drawn, 0), drawn)
