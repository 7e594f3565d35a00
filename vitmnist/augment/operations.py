"""The augmentation operations: first the operations on single images, then mixup and cutmix."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmnist.augment.base import (
    NUMBERS_PER_BOX,
    OPERATIONS,
    Boxes,
    Mixing,
    MixingOptions,
    Operation,
    draw_boxes,
    random_bits,
    random_uniform,
)
from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError, DataError

LUMA = (0.2989, 0.587, 0.114)  # Weights of red, green and blue in the brightness (ITU-R 601-2, as in torchvision).


@dataclass
class ShiftOptions:
    """pixels: the largest translation in each direction, in whole pixels."""

    pixels: int = config_field(2, at_least=0)


@OPERATIONS.register("shift", ShiftOptions)
class Shift(Operation):
    """Moves each image by a whole number of pixels, drawn uniformly up to `pixels` in each direction."""

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        return tuple(random_bits(keys, index) % (2 * int(self.options.pixels) + 1) for index in (0, 1))

    def forward(self, images: Tensor, down: Tensor, right: Tensor) -> Tensor:
        size, channels, height, width = images.shape
        margin = int(self.options.pixels)
        padded = F.pad(images, [margin, margin, margin, margin])
        # A row of the result is `width` consecutive values of the padded images. Gathering rows is 2.5 times as fast as
        # gathering elements.
        first_rows = torch.arange(size * channels, device=images.device).view(size, channels, 1) * padded.shape[2]
        rows = first_rows + (down[:, None] + torch.arange(height, device=images.device))[:, None, :]
        starts = rows * padded.shape[3] + right[:, None, None]
        return padded.flatten().unfold(0, width, 1).index_select(0, starts.flatten()).view(images.shape)


@dataclass
class AffineOptions:
    """degrees, pixels, scale, shear_degrees: the largest rotation, translation, change of size, and shear."""

    degrees: float = config_field(10.0, at_least=0, at_most=180)
    pixels: float = config_field(2.0, at_least=0)
    scale: float = config_field(0.1, at_least=0, below=1)
    shear_degrees: float = config_field(5.0, at_least=0, below=90)


@OPERATIONS.register("affine", AffineOptions)
class Affine(Operation):
    """Shears, rotates and scales each image about its centre, then moves it. Each amount is drawn uniformly.

    Interpolation is bilinear; pixels outside the image are black.
    """

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """Draw the inverse transforms for `affine_grid`, float32 `[B, 2, 3]`."""
        uniform = [random_uniform(keys, index, -1, 1).float() for index in range(5)]
        angle = math.radians(self.options.degrees) * uniform[0]
        shear = torch.tan(math.radians(self.options.shear_degrees) * uniform[1])
        scale = 1 + self.options.scale * uniform[2]
        down = self.options.pixels * uniform[3]
        right = self.options.pixels * uniform[4]
        amounts = angle, shear, torch.zeros_like(shear), right, down, scale
        return (self.inverse_transforms(amounts, height, width),)

    @staticmethod
    def inverse_transforms(amounts: Sequence[Tensor], height: int, width: int) -> Tensor:
        """Return the transforms; amounts are angle, shear along x and y, translation to the right and down, scale."""
        angle, shear_x, shear_y, right, down, scale = amounts
        cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
        # The transform maps an output pixel to its source: x' = xx * (x - right) + xy * (y - down), …
        xx, xy, yx, yy = cos - sin * shear_x, sin + cos * shear_x, cos * shear_y - sin, cos + sin * shear_y
        # The unit of `affine_grid` is half a side. Without the aspect ratio, a rotation would shear images that are not
        # square.
        aspect = height / width
        rows = [
            torch.stack([xx, xy * aspect, -2 * (xx * right + xy * down) / width], dim=1),
            torch.stack([yx / aspect, yy, -2 * (yx * right + yy * down) / height], dim=1),
        ]
        return torch.stack(rows, dim=1)

    def forward(self, images: Tensor, *params: Tensor) -> Tensor:
        grid = F.affine_grid(params[0], list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)


@dataclass
class RandomResizedCropOptions:
    """scale: relative area of the crop. ratio: width / height."""

    scale: tuple[float, float] = config_field((0.08, 1.0), is_range=True, above=0, at_most=1)
    ratio: tuple[float, float] = config_field((0.75, 1.3333), is_range=True, above=0)


@OPERATIONS.register("random_resized_crop", RandomResizedCropOptions)
class RandomResizedCrop(Operation):
    """Crops a random box of each image and resizes it to `crop_size` with bilinear interpolation, without antialiasing.

    By default crops are resized to the size of the image, and never reduced, so antialiasing would have no effect.
    """

    takes_uint8 = True
    is_crop = True

    def draw(self, keys: Tensor, height: int, width: int) -> Boxes:
        return draw_boxes(keys, self.options.scale, self.options.ratio, height, width)

    def forward(self, images: Tensor, *params: Tensor) -> Tensor:
        _, _, height, width = images.shape
        to_height, to_width = self.crop_size or (height, width)
        boxes = Boxes(*params)
        if images.dtype == torch.uint8:
            # For an image of 224×224 pixels, this takes 0.05 ms on a core; with floats, it takes 0.22 ms.
            crop = images[:, :, boxes.top : boxes.bottom, boxes.left : boxes.right]
            return F.interpolate(crop, (to_height, to_width), mode="bilinear", align_corners=False)
        rows = _compute_source_positions(boxes.top, boxes.bottom, height, to_height)
        columns = _compute_source_positions(boxes.left, boxes.right, width, to_width)
        size = len(images), to_height, to_width
        grid = torch.stack([columns[:, None, :].expand(size), rows[:, :, None].expand(size)], dim=3)
        return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


def _compute_source_positions(first: Tensor, end: Tensor, side: int, to_side: int) -> Tensor:
    """Return the source positions along one side of a resized crop, in units of `grid_sample`: `[B, to_side]`."""
    length = (end - first)[:, None]
    positions = (torch.arange(to_side, device=first.device) + 0.5) * length / to_side - 0.5
    # Clamp positions to the crop: `interpolate` does not see the rest of the image.
    positions = positions.clamp(min=0).minimum(length - 1.0) + first[:, None]
    return (2 * positions + 1) / side - 1


@dataclass
class ProbabilityOptions:
    """p: probability that an image is changed."""

    p: float = config_field(0.5, at_least=0, at_most=1)


class RandomChange(Operation):
    """Applies a function to an image with probability `p`."""

    def __init__(self, change: Callable[[Tensor], Tensor], takes_uint8: bool, options: ProbabilityOptions) -> None:
        super().__init__(options)
        self.change, self.takes_uint8 = change, takes_uint8

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor]:
        return (random_uniform(keys, 0) < self.options.p,)

    def forward(self, images: Tensor, is_changed: Tensor) -> Tensor:
        if images.dtype == torch.uint8:  # A single large image on the CPU
            return self.change(images) if is_changed else images
        # With weights 0 and 1, `lerp` is exact; on a CPU, it is twice as fast as `where` with a broadcast mask.
        return images.lerp(self.change(images), is_changed.float()[:, None, None, None])


@dataclass
class BlurOptions:
    """kernel_size: side of the kernel, odd. sigma: smallest and largest standard deviation of the Gaussian."""

    kernel_size: int = config_field(5, at_least=3)
    sigma: tuple[float, float] = config_field((0.1, 2.0), is_range=True, above=0)


@OPERATIONS.register("blur", BlurOptions)
class Blur(Operation):
    """Blurs each image with a Gaussian kernel, whose standard deviation is drawn uniformly. Borders are mirrored."""

    def __init__(self, options: BlurOptions) -> None:
        super().__init__(options)
        if options.kernel_size % 2 == 0:
            raise ConfigError(f"data.augment.operations: blur: kernel_size={options.kernel_size}: must be odd")

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor]:
        """Draw the weights of the kernels, float32 `[B, kernel_size]`."""
        kernel_size, reach = self.options.kernel_size, self.options.kernel_size // 2
        if reach >= min(height, width):
            raise ConfigError(f"blur: kernel_size={kernel_size}: must be at most {2 * min(height, width) - 1}")
        squares = torch.arange(-reach, reach + 1, device=keys.device) ** 2
        sigma = random_uniform(keys, 0, *self.options.sigma)[:, None]
        return (torch.softmax(-squares / (2 * sigma**2), dim=1).float(),)

    def forward(self, images: Tensor, kernels: Tensor) -> Tensor:
        reach, weights = kernels.shape[1] // 2, kernels.T[:, :, None, None, None]
        # Add up shifted images: the rounding of a convolution depends on the batch.
        for dim, margins in ((3, [reach, reach, 0, 0]), (2, [0, 0, reach, reach])):
            padded, side = F.pad(images, margins, mode="reflect"), images.shape[dim]
            shifted = (weight * padded.narrow(dim, start, side) for start, weight in enumerate(weights))
            images = sum(shifted, torch.zeros_like(images))
        return images


@dataclass
class RandomErasingOptions(ProbabilityOptions):
    """scale: area of the box, relative to the image. ratio: height / width."""

    scale: tuple[float, float] = config_field((0.02, 0.33), is_range=True, at_least=0, at_most=1)
    ratio: tuple[float, float] = config_field((0.3, 3.3), is_range=True, above=0)


@OPERATIONS.register("random_erasing", RandomErasingOptions)
class RandomErasing(Operation):
    """Makes a random box of an image black, with probability `p` (Zhong et al., arXiv:1708.04896)."""

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        lowest, highest = self.options.ratio
        boxes = draw_boxes(keys, self.options.scale, (1 / highest, 1 / lowest), height, width)
        return *boxes, random_uniform(keys, NUMBERS_PER_BOX) < self.options.p

    def forward(self, images: Tensor, *params: Tensor) -> Tensor:
        *box, is_erased = params
        return images * (1 - Boxes(*box).mask(*images.shape[2:]) * is_erased[:, None, None, None])


@dataclass
class ColorJitterOptions:
    """brightness, contrast, saturation: factors are drawn from [1 - x, 1 + x], and at least 0."""

    brightness: float = config_field(0.2, at_least=0)
    contrast: float = config_field(0.2, at_least=0)
    saturation: float = config_field(0.2, at_least=0)


@OPERATIONS.register("color_jitter", ColorJitterOptions)
class ColorJitter(Operation):
    """Changes brightness, contrast and saturation, in this order; torchvision's order is random.

    In images of one channel, saturation has no effect.
    """

    def draw(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """Draw the factors of brightness, contrast and saturation, float32 `[B, 1, 1, 1]` each."""
        options = self.options
        strengths = enumerate((options.brightness, options.contrast, options.saturation))
        factors = [random_uniform(keys, index, max(0.0, 1 - most), 1 + most).float() for index, most in strengths]
        return tuple(factor[:, None, None, None] for factor in factors)

    def forward(self, images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
        if self.options.brightness:
            images.mul_(brightness).clamp_(0, 1)
        if self.options.contrast:
            # Sum row by row: torch would split a sum over the whole image among threads, and change the rounding.
            mean = to_grey(images).contiguous().mean(dim=3, keepdim=True).mean(dim=2, keepdim=True)
            torch.lerp(mean, images, contrast, out=images).clamp_(0, 1)
        if self.options.saturation and images.shape[1] > 1:
            torch.lerp(to_grey(images), images, saturation, out=images).clamp_(0, 1)
        return images


def to_grey(images: Tensor) -> Tensor:
    """Return the brightness of each pixel, `[B, 1, H, W]`; raises `DataError` unless there are 1 or 3 channels."""
    if images.shape[1] == 1:
        return images
    if images.shape[1] != 3:
        raise DataError(f"data.augment: changes of colour need images of 1 or 3 channels, found {images.shape[1]}")
    # A tensor of the factors would be copied to the GPU in each call, and the host would wait for the copy.
    red, green, blue = (images[:, channel : channel + 1] * factor for channel, factor in enumerate(LUMA))
    return red.add_(green).add_(blue)


for _name, _change, _takes_uint8 in (
    ("horizontal_flip", partial(torch.flip, dims=[3]), True),
    ("vertical_flip", partial(torch.flip, dims=[2]), True),
    ("grayscale", to_grey, False),
):
    OPERATIONS.register(_name, ProbabilityOptions)(partial(RandomChange, _change, _takes_uint8))


@OPERATIONS.register("mixup", MixingOptions)
class Mixup(Mixing):
    """Averages two images (Zhang et al., arXiv:1710.09412)."""

    def forward(self, images: Tensor, partners: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.draw_weights(keys, 1)
        return partners.lerp(images, weights[:, None, None, None]), weights


@OPERATIONS.register("cutmix", MixingOptions)
class Cutmix(Mixing):
    """Pastes a box of the partner (Yun et al., arXiv:1905.04899). The weight of an image is the area that it keeps.

    If the partner would get the larger area, the two swap: the image keeps the box, and the partner fills the rest.
    """

    def forward(self, images: Tensor, partners: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        larger = self.draw_weights(keys, 1)
        # Size the box by w or 1 - w with equal probability, then give the image the larger area. The smaller weight
        # alone would paste less than the paper, because boxes are clipped at the border.
        half = 0.5 * (1 - larger.where(random_bits(keys, 4) % 2 == 0, 1 - larger)).sqrt()
        edges = []
        for index, side in ((2, height), (3, width)):
            centre, reach = random_bits(keys, index) % side, (half * side).long()
            edges.append(((centre - reach).clamp_(min=0), (centre + reach).clamp_(max=side)))
        (top, bottom), (left, right) = edges
        box = Boxes(top, left, bottom, right).mask(height, width)
        outside = 1 - (bottom - top) * (right - left) / (height * width)
        pasted = box.where((outside >= 0.5)[:, None, None, None], 1 - box)
        return images.lerp(partners, pasted), outside.maximum(1 - outside)
