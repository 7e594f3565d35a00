"""Each operation is torchvision's, applied image by image with the parameters that were drawn for its index."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from tests.support.operations import built, images, keys, operation
from vitmnist.augment.base import NUMBERS_PER_BOX, OPERATIONS, Mixing, draw_boxes, random_bits, random_uniform
from vitmnist.augment.preprocess import Compose, Preprocess
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
    name=st.sampled_from([name for name in OPERATIONS.members() if not isinstance(built(name), Mixing)]),
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
    if options := dict(IDENTITY_OPTIONS.get(name, {})):
        if "ratio" in options:
            options["ratio"] = [(side + extra) / side] * 2
        torch.testing.assert_close(operation(name, **options)(source, keys(number)), source, rtol=0, atol=1e-5)


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
