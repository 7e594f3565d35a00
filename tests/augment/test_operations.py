"""Each operation is torchvision's, applied image by image with the parameters that were drawn for its index."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from tests.support.operations import built, images, keys, operation
from vitmnist.augment.base import NUMBERS_PER_BOX, OPERATIONS, Mixing, _mix64, draw_boxes, draw_keys, random_uniform
from vitmnist.augment.trivial import NAMES
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError

JITTER = {"brightness": 0, "contrast": 0, "saturation": 0}
# The options of each operation with which it changes no image.
IDENTITY_OPTIONS = {
    "shift": {"pixels": 0},
    "affine": {"degrees": 0, "pixels": 0, "scale": 0, "shear_degrees": 0},
    "random_resized_crop": {"scale": [1, 1], "ratio": [1, 1]},
    "horizontal_flip": {"p": 0},
    "color_jitter": JITTER,
    "random_erasing": {"p": 0},
    "vertical_flip": {"p": 0},
    "grayscale": {"p": 0},
    "blur": {"sigma": [0.01, 0.01]},
    "trivial": {"p": 0},
}


@pytest.mark.parametrize(
    ("size", "antialias", "to_bytes"),
    [(None, True, False), *((size, False, to_bytes) for size in (None, 8, 40) for to_bytes in (False, True))],
)
def test_crops_match_torchvision(size: int | None, antialias: bool, to_bytes: bool) -> None:
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


@pytest.mark.parametrize("alone", [None, "degrees", "pixels", "scale", "shear_degrees"])
def test_affine_images_match_torchvision(alone: str | None) -> None:
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


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("horizontal_flip", TF.horizontal_flip),
        ("vertical_flip", TF.vertical_flip),
        ("grayscale", partial(TF.rgb_to_grayscale, num_output_channels=3)),
    ],
)
def test_flips_and_grey_images_match_torchvision_with_frequency_p(name: str, theirs: Callable) -> None:
    source = images(2000)
    found = operation(name, p=0.3)(source, keys(2000))
    is_changed = (found != source).flatten(1).any(dim=1)
    torch.testing.assert_close(found[is_changed], theirs(source[is_changed]), rtol=0, atol=1e-6)
    assert is_changed.double().mean() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("kernel_size", [3, 9])
def test_blurred_images_match_torchvision(kernel_size: int) -> None:
    found = operation("blur", kernel_size=kernel_size, sigma=[0.3, 3])(images(50), keys(50))
    sigmas = random_uniform(keys(50), 0, 0.3, 3).tolist()
    for image, sigma, ours in zip(images(50), sigmas, found, strict=True):
        theirs = TF.gaussian_blur(image, [kernel_size] * 2, [sigma] * 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for refused in (4, 25):
        with pytest.raises(ConfigError, match=f"blur: kernel_size={refused}: must be (odd|at most 23)$"):
            operation("blur", kernel_size=refused)(images(1), keys(1))


BYTES = partial(TF.to_dtype, dtype=torch.uint8, scale=True)
AFFINE = partial(TF.affine, interpolation=TF.InterpolationMode.BILINEAR)
# The operations of torchvision; m is the strength, with a sign.
AT_STRENGTH = {
    "identity": lambda image, m: image,
    "rotate": lambda image, m: AFFINE(image, 135 * m, [0, 0], 1, [0.0, 0.0]),
    "shear_x": lambda image, m: AFFINE(image, 0, [0, 0], 1, [math.degrees(math.atan(0.99 * m)), 0.0]),
    "shear_y": lambda image, m: AFFINE(image, 0, [0, 0], 1, [0.0, math.degrees(math.atan(0.99 * m))]),
    "translate_x": lambda image, m: AFFINE(image, 0, [32 * m, 0], 1, [0.0, 0.0]),
    "translate_y": lambda image, m: AFFINE(image, 0, [0, 32 * m], 1, [0.0, 0.0]),
    "brightness": lambda image, m: TF.adjust_brightness(image, 1 + 0.99 * m),
    "contrast": lambda image, m: TF.adjust_contrast(image, 1 + 0.99 * m),
    "color": lambda image, m: TF.adjust_saturation(image, 1 + 0.99 * m),
    "sharpness": lambda image, m: TF.adjust_sharpness(image, 1 + 0.99 * m),
    "posterize": lambda image, m: TF.posterize(BYTES(image), 8 - round(6 * abs(m))) / 255,
    "solarize": lambda image, m: TF.solarize(BYTES(image), 255 * (1 - abs(m))) / 255,
    "autocontrast": lambda image, m: TF.autocontrast(image),
    "equalize": lambda image, m: TF.equalize(BYTES(image)) / 255,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["trivial", *NAMES[1:]])
def test_operations_with_a_strength_match_torchvision(name: str, channels: int) -> None:
    """Pixels of 8 bits differ by at most 1e-5, also in a grey image and one of a single value."""
    source = images(channels=channels).mul(255).round().div(255)
    source[0], source[1] = 0.2, source[1, :1]
    _, indices, strengths, factors = built(name).draw(keys(), 12, 17)
    signed = (strengths * (factors - 1).sign()).tolist()
    for image, index, m, ours in zip(source, indices, signed, operation(name)(source, keys()), strict=True):
        assert name in ("trivial", NAMES[index])
        torch.testing.assert_close(ours, AT_STRENGTH[NAMES[index]](image, m), rtol=0, atol=1e-5)


def test_trivial_draws_operation_strength_and_sign_evenly_and_within_the_options() -> None:
    _, indices, strengths, factors = built("trivial").draw(keys(43_400), 12, 17)
    assert (indices.bincount() - 3100).abs().max() < 5 * math.sqrt(3100)
    counts = (indices * 62 + (30 * strengths).round().long() * 2 + (factors > 1)).bincount().view(14, 31, 2)
    assert counts[:, 1:].min() > 50 - 5 * math.sqrt(50)
    assert counts[:, 0].sum(dim=1).min() > 100 - 5 * math.sqrt(100)  # The weakest change has no sign.
    _, indices, strengths, _ = built("solarize", p=0.3, strength=[0.2, 0.5]).draw(keys(2000), 12, 17)
    assert (indices > 0).double().mean() == pytest.approx(0.3, abs=0.05)
    assert (float(strengths.min()), float(strengths.max())) == pytest.approx((0.2, 0.5))


@pytest.mark.parametrize("name", [name for name in OPERATIONS.members() if not isinstance(built(name), Mixing)])
def test_an_image_changes_in_the_same_way_in_any_batch(name: str) -> None:
    """The images are so small that they are not processed one by one."""
    source = images(40)
    expected = torch.cat([operation(name)(source[row : row + 1], keys(40)[row : row + 1]) for row in range(40)])
    assert torch.equal(operation(name)(source, keys(40)), expected)


def test_erased_boxes_match_torchvision() -> None:
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
def test_colours_match_torchvision_in_the_documented_order(strengths: dict[str, float], channels: int) -> None:
    """Pixels differ by at most 1e-5 after one change, and by 1e-4 after all."""
    source = images(channels=channels)
    found = operation("color_jitter", **{**JITTER, **strengths})(source, keys())
    for row, (image, ours) in enumerate(zip(source, found, strict=True)):
        for number, name in enumerate(JITTER):
            if strength := strengths.get(name):
                factor = float(random_uniform(keys(), number, 1 - strength, 1 + strength)[row])
                image = getattr(TF, f"adjust_{name}")(image, factor)  # noqa: PLW2901
        torch.testing.assert_close(ours, image, rtol=0, atol=1e-5 if len(strengths) == 1 else 1e-4)


@pytest.mark.parametrize("name", ["color_jitter", "trivial", "blur"])
def test_colours_are_rounded_alike_with_any_threads_layout_and_batch(name: str) -> None:
    """The images are so large that torch would divide the sum over one image among its threads."""
    change, source, drawn = operation(name), images(20, height=200, width=210), keys(20)
    expected, threads = change(source, drawn), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for row in range(20):
            assert torch.equal(change(source[row : row + 1], drawn[row : row + 1]), expected[row : row + 1])
        for grey in (source[:, :1], source[:, :1].mT.contiguous().mT):
            assert torch.equal(change(grey, drawn), change(grey.contiguous(), drawn))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["color_jitter", "trivial", "blur"])
def test_colours_can_be_compiled(name: str) -> None:
    compiled = torch.compile(operation(name), backend="eager", fullgraph=True)
    assert torch.equal(compiled(images(5), keys(5)), operation(name)(images(5), keys(5)))


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
