"""Each operation is torchvision's, applied image by image with the parameters that were drawn for its index."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from vitmnist.augment.base import (
    NUMBERS_PER_BOX,
    OPERATIONS,
    Mixing,
    Operation,
    _mix64,
    draw_boxes,
    draw_keys,
    random_uniform,
)
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError

NUMBER = 200
JITTER = {"brightness": 0, "contrast": 0, "saturation": 0}
# The options of each operation with which it changes no image.
IDENTITY_OPTIONS = {
    "shift": {"pixels": 0},
    "affine": {"degrees": 0, "pixels": 0, "scale": 0, "shear_degrees": 0},
    "random_resized_crop": {"scale": [1, 1], "ratio": [1, 1]},
    "horizontal_flip": {"p": 0},
    "color_jitter": JITTER,
    "random_erasing": {"p": 0},
}


def built(name: str, **options: object) -> Operation | Mixing:
    return OPERATIONS.build(OPERATIONS.with_defaults({"name": name, **options}))


def operation(
    name: str, crop_size: tuple[int, int] | None = None, **options: object
) -> Callable[[Tensor, Tensor], Tensor]:
    """An operation as a function of images and keys that does not write to the images."""
    module = built(name, **options)
    module.crop_size = crop_size
    return lambda images, keys: module(images.clone(), *module.draw(keys, *images.shape[2:]))


def keys(number: int = NUMBER) -> Tensor:
    return draw_keys(EpochSampler(number, number, 0, "none"), 0, torch.device("cpu"))


def images(number: int = NUMBER, channels: int = 3, height: int = 12, width: int = 17, seed: int = 0) -> Tensor:
    return torch.rand(number, channels, height, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "antialias", "to_bytes"),
    [(None, True, False), *((size, False, to_bytes) for size in (None, 8, 40) for to_bytes in (False, True))],
)
def test_crops_are_those_of_torchvision(size: int | None, antialias: bool, to_bytes: bool) -> None:
    """Floats differ by at most 1e-5, and bytes are equal. Antialiasing would change nothing in crops of that size."""
    source, tolerance = (images().mul(255).to(torch.uint8), 0) if to_bytes else (images(), 1e-5)
    crop = operation("random_resized_crop", size and (size, size))
    boxes = draw_boxes(keys(), (0.08, 1.0), (0.75, 1.3333), 12, 17)
    for image, key, top, left, bottom, right in zip(source, keys(), *boxes, strict=True):
        box = int(top), int(left), int(bottom - top), int(right - left)
        theirs = TF.resized_crop(image, *box, [size or 12, size or 17], antialias=antialias)
        torch.testing.assert_close(crop(image[None], key[None])[0], theirs, rtol=0, atol=tolerance)


def test_shift_moves_whole_images_evenly_and_fills_with_black() -> None:
    source = images(20_000, 2, 6, 9)
    moved = operation("shift", pixels=1)(source, keys(20_000))
    framed = torch.nn.functional.pad(source, (1, 1, 1, 1))
    taken = torch.zeros(3, 3, dtype=torch.int64)
    for down in range(3):
        for right in range(3):
            window = framed[:, :, down : down + 6, right : right + 9]
            taken[down, right] = ((window - moved).abs().amax(dim=(1, 2, 3)) < 1e-6).sum()
    assert taken.sum() == 20_000
    # Each shift has a ninth of the images, within five standard deviations.
    assert (taken - 20_000 / 9).abs().max() < 5 * math.sqrt(20_000 * 8 / 81)


def test_boxes_have_the_areas_and_shapes_asked_for_and_lie_anywhere() -> None:
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


@pytest.mark.parametrize("alone", [None, "degrees", "pixels", "scale", "shear_degrees"])
def test_affine_images_are_those_of_torchvision(alone: str | None) -> None:
    """Pixels differ by at most 1e-4, for each parameter alone and for all together."""
    bounds = {"degrees": 30.0, "pixels": 4.0, "scale": 0.3, "shear_degrees": 20.0}
    bounds = {name: bound * (alone in (None, name)) for name, bound in bounds.items()}
    found = operation("affine", **bounds)(images(50), keys(50))
    names = ("degrees", "shear_degrees", "scale", "pixels", "pixels")
    uniform = (random_uniform(keys(50), index, -1, 1).float() for index in range(5))
    params = torch.stack([bounds[name] * values for name, values in zip(names, uniform, strict=True)], dim=1)
    for name, values in zip(names, params.T, strict=True):
        assert 0.9 * bounds[name] <= values.abs().max() <= bounds[name]
    for image, (angle, shear, scale, down, right), ours in zip(images(50), params.tolist(), found, strict=True):
        theirs = TF.affine(image, angle, [right, down], 1 + scale, [shear, 0.0], TF.InterpolationMode.BILINEAR)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_flips_are_those_of_torchvision_and_as_frequent_as_p() -> None:
    source = images(2000)
    found = operation("horizontal_flip", p=0.3)(source, keys(2000))
    is_flipped = torch.tensor(
        [torch.equal(ours, TF.horizontal_flip(image)) for ours, image in zip(found, source, strict=True)]
    )
    assert all(torch.equal(found[row], source[row]) for row in range(2000) if not is_flipped[row])
    assert is_flipped.double().mean() == pytest.approx(0.3, abs=0.05)


def test_erased_boxes_are_those_of_torchvision() -> None:
    found = operation("random_erasing", p=0.4)(images(), keys())
    boxes = draw_boxes(keys(), (0.02, 0.33), (1 / 3.3, 1 / 0.3), 12, 17)
    is_erased = random_uniform(keys(), NUMBERS_PER_BOX) < 0.4
    assert 0.25 < is_erased.double().mean() < 0.55
    for image, erased, top, left, bottom, right, ours in zip(images(), is_erased, *boxes, found, strict=True):
        box = int(top), int(left), int(bottom - top), int(right - left)
        assert torch.equal(ours, TF.erase(image, *box, torch.zeros(())) if erased else image)


STRENGTHS = [{"brightness": 0.8}, {"contrast": 0.8}, {"saturation": 0.8}, dict.fromkeys(JITTER, 0.4)]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strengths", STRENGTHS)
def test_colours_are_those_of_torchvision_in_the_order_documented(strengths: dict[str, float], channels: int) -> None:
    """Pixels differ by at most 1e-5 after one change, and by 1e-4 after all."""
    source = images(channels=channels)
    found = operation("color_jitter", **{**JITTER, **strengths})(source, keys())
    for row, (image, ours) in enumerate(zip(source, found, strict=True)):
        for number, name in enumerate(JITTER):
            if strength := strengths.get(name):
                factor = float(random_uniform(keys(), number, 1 - strength, 1 + strength)[row])
                image = getattr(TF, f"adjust_{name}")(image, factor)  # noqa: PLW2901
        torch.testing.assert_close(ours, image, rtol=0, atol=1e-5 if len(strengths) == 1 else 1e-4)


def test_jitter_rounds_alike_with_any_threads_layout_and_batch() -> None:
    """The images are so large that torch would divide the sum over one image among its threads."""
    jitter, source = operation("color_jitter"), images(3, height=200, width=210)
    expected, threads = jitter(source, keys(3)), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(jitter(source[1:2], keys(3)[1:2]), expected[1:2])
        for grey in (source[:, :1], source[:, :1].mT.contiguous().mT):
            assert torch.equal(jitter(grey, keys(3)), jitter(grey.contiguous(), keys(3)))
    finally:
        torch.set_num_threads(threads)


def test_jitter_can_be_compiled() -> None:
    jitter = torch.compile(operation("color_jitter"), backend="eager", fullgraph=True)
    assert torch.equal(jitter(images(5), keys(5)), operation("color_jitter")(images(5), keys(5)))


def test_jitter_refuses_two_channels() -> None:
    with pytest.raises(DataError, match="need images of 1 or 3 channels, found 2"):
        operation("color_jitter")(images(2, channels=2), keys(2))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(IDENTITY_OPTIONS)),
    side=st.integers(5, 20),
    extra=st.integers(0, 9),
    number=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_any_batch_keeps_its_shape_dtype_and_range(
    name: str, side: int, extra: int, number: int, channels: int, seed: int
) -> None:
    """Parameters for no change give the same images, within 1e-5."""
    source = images(number, channels, side, side + extra, seed)
    found = operation(name)(source, keys(number))
    assert (found.shape, found.dtype) == (source.shape, torch.float32)
    assert found.min() >= -1e-6
    assert found.max() <= 1 + 1e-6
    options = dict(IDENTITY_OPTIONS[name])
    if "ratio" in options:
        options["ratio"] = [(side + extra) / side] * 2
    torch.testing.assert_close(operation(name, **options)(source, keys(number)), source, rtol=0, atol=1e-5)


def test_random_numbers_are_those_of_splitmix64() -> None:
    """These are the first outputs for seed 1234567, as published with the reference implementation."""
    states = [(1234567 + 0x9E3779B97F4A7C15 * step) % 2**64 for step in (1, 2, 3)]
    found = _mix64(torch.tensor([state - 2**64 if state >= 2**63 else state for state in states]))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in found.tolist()] == published


def by_index(batch_size: int, shuffle: str, seed: int = 5, epoch: int = 2) -> Tensor:
    sampler = EpochSampler(1000, batch_size, seed, shuffle)
    numbers = torch.empty(1000, dtype=torch.int64)
    numbers[sampler.indices(epoch)] = draw_keys(sampler, epoch, torch.device("cpu"))
    return numbers


def test_an_images_number_depends_on_seed_epoch_and_index_and_not_on_its_batch() -> None:
    """The number depends neither on the batch size nor on the order."""
    expected = by_index(1, "none")
    assert torch.equal(by_index(4, "sample"), expected)
    assert torch.equal(by_index(7, "batch"), expected)
    found = torch.cat([by_index(1000, "none", seed, epoch) for seed in range(4) for epoch in range(4)])
    assert len(found.unique()) == 16_000
