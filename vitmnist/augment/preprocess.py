"""Augments and normalises a batch on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from vitmnist.augment.base import OPERATIONS, Mixing, Operation, derive_keys, draw_keys, draw_partners
from vitmnist.config.schema import DataConfig
from vitmnist.config.validation import read_size, validate
from vitmnist.data.channel_statistics import check_layout, check_statistics, compute_statistics
from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import Data, TensorSet, as_source
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.background_map import map_slices
from vitmnist.store.rows import is_large

Params = tuple[Tensor, ...]  # The random parameters of an operation for a batch, `[B, …]` each


@dataclass
class AugmentOptions:
    """See `conf/data/augment/compose.yaml`."""

    name: str = MISSING
    operations: list[Any] = MISSING


def build_augment(data: DataConfig) -> Compose:
    """Build the augmentation of the section `data`; raises `ConfigError`."""
    options = validate(AugmentOptions, data.augment, "data.augment")
    if options.name == "none" and options.operations:
        raise ConfigError("data.augment.name=none: is the empty list; for operations, set data/augment=compose")
    crop_size = None if data.crop_size is None else read_size("data.crop_size", data.crop_size)
    return Compose(options.operations, crop_size)


def get_input_size(data: DataConfig, height: int, width: int) -> tuple[int, int]:
    """Return height and width of the model's input; raises `ConfigError` if it is larger than the dataset's images."""
    size = build_augment(data).crop_size or (height, width)
    if size[0] > height or size[1] > width:
        raise ConfigError(f"data.crop_size={data.crop_size}: must be at most the size of the images, {height}×{width}")
    return size


class Compose(nn.Module):
    """Applies operations in order. The random numbers of an operation depend on its position in the list.

    Args:
        operations: the name and parameters of each, `{"name": "shift", "pixels": 3}`. Other parameters have defaults.
        crop_size: height and width of the model's input. Random crops have this size, and larger images are cropped to
            it at their centre, after the operations; by default images keep their size.

    Raises:
        ConfigError: an operation or parameter is unknown, or an operation that mixes images is not the last one.
    """

    operations: list[Operation]

    def __init__(self, operations: Sequence[Mapping[str, Any]], crop_size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.crop_size = crop_size
        self.mixing: Mixing | None = None
        self.operations = nn.ModuleList()  # type: ignore[assignment]
        for index, values in enumerate(operations):
            if self.mixing:
                mixing = f"{OPERATIONS.group}.{index - 1}.name={operations[index - 1]['name']}"
                raise ConfigError(f"{mixing}: mixes finished images; move it to the end of the list")
            build, options = OPERATIONS.resolve(values, f"{OPERATIONS.group}.{index}", complete=True)
            operation = build(options)
            if isinstance(operation, Mixing):
                self.mixing = operation
            else:
                operation.crop_size = crop_size
                self.operations.append(operation)

    def draw(self, keys: Tensor, height: int, width: int) -> list[Params]:
        """Draw the random parameters of each operation from the `draw_keys` of the images."""
        params = []
        for index, operation in enumerate(self.operations):
            params.append(operation.draw(derive_keys(keys, index), height, width))
            if operation.is_crop and self.crop_size:
                height, width = self.crop_size
        return params

    def forward(self, images: Tensor, params: Sequence[Sequence[Tensor]]) -> Tensor:
        """Apply the operations. Uint8 images are converted before the first operation that does not take them."""
        for operation, values in zip(self.operations, params, strict=True):
            if images.dtype == torch.uint8 and not operation.takes_uint8:
                images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            # Calling the module itself would check for hooks once per large image.
            images = operation.forward(images, *values)
        return center_crop(images, self.crop_size)


def center_crop(images: Tensor, size: tuple[int, ...] | None) -> Tensor:
    """Crop images larger than `size` at their centre, as torchvision's `CenterCrop` does."""
    if size is None or (images.shape[2] <= size[0] and images.shape[3] <= size[1]):
        return images
    starts = [max(0, round((side - to) / 2)) for side, to in zip(images.shape[2:], size, strict=True)]
    rows, columns = (slice(start, start + to) for start, to in zip(starts, size, strict=True))
    return images[:, :, rows, columns]


class Preprocess(nn.Module):
    """Normalises uint8 images `[B, C, H, W]` to float32, bit for bit as torchvision's `ToTensor` and `Normalize` do.

    Floating-point images are assumed to be normalised, and pass through. To be augmented, they are converted back to
    uint8 if `data` is given, so that augmented images are the same with all loaders.

    Images that are not augmented are cropped at their centre to the `crop_size` of the augmentation.

    Args:
        data: a split, or a pair of tensors with uint8 images, from which the statistics are computed.
        augment: applied before normalising if keys are given; if it mixes images, `mix_batch` applies it.
        classes: the number of classes, for an augmentation that mixes images; by default the number in the split.
        mean: instead of `data`, the mean of each channel of images in 0…1; a number for one channel.
        std: the standard deviation of each channel; required with `mean`.

    Raises:
        ConfigError: neither `data` nor `mean` and `std` are given, or both, or impossible values.
        DataError: the images of `data` are not uint8 `[N, C, H, W]`.
    """

    mean: Tensor
    std: Tensor
    max_value: Tensor

    def __init__(
        self,
        data: Data | None = None,
        augment: Compose | None = None,
        *,
        classes: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if (data is None) == (mean is None) or (mean is None) != (std is None):
            raise ConfigError("Preprocess takes data, as make_loader does, or both mean= and std=")
        if data is not None:
            source = as_source(data)
            if not isinstance(source, TensorSet):
                raise ConfigError("Preprocess computes no statistics of a map-style dataset; give mean= and std=")
            mean, std = (source.mean, source.std) if isinstance(source, Split) else compute_statistics(source.images)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.float32).view(-1, 1, 1))
        check_statistics("mean= and std=", self.mean.flatten().tolist(), self.std.flatten().tolist())
        # `max_value` is a tensor because CUDA divides by a Python number by multiplying with its reciprocal.
        self.register_buffer("max_value", torch.tensor([255.0]))
        self._no_augment = Compose([])
        self.augment = augment or self._no_augment
        self.has_mixing = self.augment.mixing is not None
        """Whether the augmentation mixes images and their labels: then call `mix_batch`."""
        self._data_is_uint8 = data is not None  # Statistics exist only for uint8 images.
        self.classes = len(data.classes) if isinstance(data, Split) else classes

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return float32 `[B, C, H, W]`, normalised. Without keys, float images keep their dtype. Modifies no batch.

        Args:
            keys: int64 `[B]`, from the method `random_keys`.

        Raises:
            ConfigError: keys are given, and the augmentation mixes images and labels: call `mix_batch`.
            DataError: images that are neither uint8 nor floating point, or have another layout or number of channels.
        """
        if self.has_mixing and keys is not None:
            raise ConfigError("this augmentation mixes images and their labels; call mix_batch(images, labels, keys)")
        return self._augment_and_normalize(images, keys)

    def _augment_and_normalize(self, images: Tensor, keys: Tensor | None) -> Tensor:
        """Without keys, normalise uint8 images and return floats. With keys, convert floats back and augment too."""
        check_layout(images.shape, len(self.mean))
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise DataError(f"images: must be uint8, or floating point and normalised, found {images.dtype}")
        if keys is None:
            images = center_crop(images, self.augment.crop_size)
            return images if images.is_floating_point() else self._normalize(self._no_augment, images, [])
        if images.is_floating_point():
            images = images * self.std + self.mean
            if self._data_is_uint8:
                # Images normalised with other statistics can leave 0…1, and `to` would wrap them around.
                images = images.mul_(self.max_value).round_().clamp_(0, 255).to(torch.uint8)
        # Draw for the whole batch: in threads, small operations would wait for the GIL.
        return self._normalize(self.augment, images, self.augment.draw(keys, *images.shape[2:]))

    def _normalize(self, augment: Compose, images: Tensor, params: list[Params]) -> Tensor:
        """Augment and normalise images: large ones on the CPU one by one in threads, others as a batch."""
        is_eager_on_cpu = images.device.type == "cpu" and not torch.compiler.is_compiling()
        size = augment.crop_size or images.shape[2:]
        if not (is_eager_on_cpu and is_large(size)):
            augmented = augment.forward(self._to_unit_floats(images), params)
            return augmented.contiguous().sub_(self.mean).div_(self.std)  # The centre crop of a batch is a view.
        normalized = torch.empty(*images.shape[:2], *size, dtype=torch.float32, device="cpu")

        def normalize_image(row: slice) -> None:
            image = augment.forward(images[row], [[values[row] for values in drawn] for drawn in params])
            torch.sub(self._to_unit_floats(image, normalized[row]), self.mean, out=normalized[row]).div_(self.std)

        map_slices(normalize_image, len(images), size=1)
        return normalized

    def _to_unit_floats(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """Convert uint8 images to contiguous float32 in 0…1; return float images unchanged."""
        if images.dtype != torch.uint8:
            return images
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
        return out.copy_(images).div_(self.max_value)

    def mix_batch(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and augment a whole batch with an augmentation that mixes images, such as mixup.

        Args:
            labels: int64 `[B]`. A negative label marks padding, which is neither mixed nor a partner.
            keys: int64 `[B]`, from the method `random_keys`.

        Returns:
            The images, and their class probabilities for `cross_entropy`, float32 `[B, classes]`: at least 0.5 for the
            label of an image, zero for padding. Raises the errors of `forward`.
        """
        if self.augment.mixing is None:
            raise ConfigError("this augmentation does not mix images; call Preprocess itself")
        if self.classes is None:
            raise ConfigError("mixing makes class probabilities: pass Preprocess a split, or the number of classes=")
        images = self._augment_and_normalize(images, keys)
        keys = derive_keys(keys, len(self.augment.operations))
        partners = draw_partners(keys, labels >= 0)
        mixed, weights = self.augment.mixing(images, images[partners], keys)
        one_hot = (labels[:, None] == torch.arange(self.classes, device=labels.device)).float()
        return mixed, one_hot[partners].lerp(one_hot, weights[:, None])

    def random_keys(self, sampler: EpochSampler, epoch: int, start: int = 0) -> Iterator[Tensor | None]:
        """Yield the random keys of each batch of an epoch from `start` on; None without augmentation."""
        if not self.augment.operations and not self.has_mixing:
            return repeat(None)
        return iter(draw_keys(sampler, epoch, self.mean.device, start).split(sampler.rank_batch_size))
