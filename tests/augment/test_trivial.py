"""Operations with a strength match torchvision's, and `trivial` draws them evenly."""

import math
from functools import partial

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from tests.support.operations import built, images, keys, operation
from vitmnist.augment.trivial import NAMES

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
