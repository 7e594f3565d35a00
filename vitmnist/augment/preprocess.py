"""Normalises and augments a batch on its device, before the model sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from vitmnist.augment.compose import Compose
from vitmnist.augment.keys import augment_keys
from vitmnist.data.channel_statistics import check_layout
from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.data.threads import PART, in_parts
from vitmnist.errors import ConfigError, DataError
from vitmnist.loaders.make_loader import Data, loadable
from vitmnist.store.rows import is_large

Steps = Sequence[tuple[Callable[..., Tensor], Sequence[Any]]]
"""Operations on one picture, and the other arguments of each for each picture."""


class Preprocess(nn.Module):
    """Normalise uint8 images `[B, C, H, W]` to float32, bit for bit as torchvision's `ToTensor` and `Normalize` do.

    Images of a floating-point dtype are taken to be normalised, and pass through; their values are not looked at. To be
    augmented, they are converted back to uint8 if `data` is given, so that all loaders give the same augmented images.

    Where the augmentation makes images smaller, images that are not augmented are cropped to that size at the centre.

    Args:
        data: what `make_loader` takes. A split has its channel statistics; for a pair of tensors or a map-style
            dataset, they are computed from its uint8 images, each of which is read once.
        augment: applied before normalising if keys are given; one that mixes images is applied by `mixed`.
        classes: number of classes, for an augmentation that mixes images; known if `data` is a split.
        mean: instead of `data`, with `std`: per channel, of images scaled to 0…1; a number for one channel.
        std: likewise.
        size: height and width of what the model sees; by default those of the augmented images of `data`.

    Raises:
        ConfigError: neither `data` nor `mean` and `std`, or both, or impossible values.
        DataError: `data` without such statistics: floats, `[N, H, W]`, channels last.
    """

    mean: Tensor
    std: Tensor
    white: Tensor

    def __init__(
        self,
        data: Data | None = None,
        augment: Compose | None = None,
        *,
        classes: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if (data is None) == (mean is None) or (mean is None) != (std is None):
            raise ConfigError("Preprocess takes data, as make_loader does, or both mean= and std=")
        source = None if data is None else loadable(data)
        channel_mean, channel_std = (mean, std) if source is None else source.channel_statistics()
        if augment is not None and isinstance(source, TensorSet):
            size = size or augment.output_size(*source.images.shape[-2:])
        self.register_buffer("mean", torch.as_tensor(channel_mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.as_tensor(channel_std, dtype=torch.float32).view(-1, 1, 1))
        is_possible = (self.mean >= 0).all() & (self.mean <= 1).all() & (self.std > 0).all() & (self.std <= 1).all()
        if len(self.mean) != len(self.std) or not len(self.mean) or not is_possible:
            raise ConfigError(
                f"mean={mean}, std={std}: must be one number per channel each, of images scaled to 0…1: mean 0 to 1, "
                "std above 0 and at most 1"
            )
        # A tensor and not the number 255: CUDA divides by a scalar by multiplying with its rounded reciprocal.
        self.register_buffer("white", torch.tensor([255.0]))
        self.augment, self.size = augment, size
        self._are_bytes = data is not None  # whose statistics are those of uint8 images
        self.classes = len(data.classes) if isinstance(data, Split) else classes

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Normalised float32 `[B, C, H, W]`; without keys, float images keep their dtype. Never writes to the batch.

        Args:
            keys: int64 `[B]`, from the method `keys`.

        Raises:
            ConfigError: keys are given, and the augmentation mixes images, which needs their labels: call `mixed`.
            DataError: images that are neither uint8 nor floating point, or have another layout or number of channels.
        """
        if self.mixes and keys is not None:
            raise ConfigError("this augmentation mixes images and their labels; call mixed(images, labels, keys)")
        return self.on_floats(*self.on_bytes(images, keys))

    def on_bytes(self, images: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The first part of `forward`, which `torch.compile` must not see.

        Images whose augmentation begins with bytes are finished here; the keys are then None.
        """
        check_layout(images.shape, len(self.mean))
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise DataError(f"images: must be uint8, or floating point and normalised, found {images.dtype}")
        if self.augment is None or keys is None:
            return self._centre(images), None
        if self._are_bytes and images.is_floating_point():
            images = self._unit_range(images).mul_(self.white).round_().to(torch.uint8)
        return (self._in_parts(images, keys), None) if self.augment.number_on_bytes(images) else (images, keys)

    def _centre(self, images: Tensor) -> Tensor:
        """The centre of images that are larger than what the model sees, as torchvision's `CenterCrop`."""
        if self.size is None or (images.shape[2] <= self.size[0] and images.shape[3] <= self.size[1]):
            return images
        starts = [max(0, round((side - to) / 2)) for side, to in zip(images.shape[2:], self.size, strict=True)]
        rows, columns = (slice(start, start + to) for start, to in zip(starts, self.size, strict=True))
        return images[:, :, rows, columns]

    def on_floats(self, images: Tensor, keys: Tensor | None) -> Tensor:
        """The second part: the remaining operations, and normalising."""
        if images.is_floating_point() and keys is None:
            return images
        if torch.compiler.is_compiling() or images.device.type != "cpu" or images.numel() <= PART:
            return self._finished(images, self._draw(images, keys))
        return self._in_parts(images, keys)

    def _in_parts(self, images: Tensor, keys: Tensor | None) -> Tensor:
        """The images augmented and normalised in threads: large ones one by one, others as many as a cache holds."""
        # Drawn for the whole batch: in threads, small operations would mostly wait for the interpreter's lock.
        drawn = self._draw(images, keys)
        augment = self.augment if drawn else None
        size = augment.output_size(*images.shape[2:]) if augment else images.shape[2:]
        finished = torch.empty((*images.shape[:2], *size), dtype=torch.float32, device=images.device)
        if is_large(size):
            steps, number = (augment.by_picture(drawn), augment.number_on_bytes(images)) if augment else ([], 0)
            finish = partial(self._finish_pictures, images, steps[:number], steps[number:], finished)
            in_parts(finish, len(images), size=1)
            return finished

        def finish_part(rows: slice) -> None:
            part = finished[rows]
            result = self._finished(images[rows], [[one[rows] for one in numbers] for numbers in drawn], part)
            if result is not part:
                part.copy_(result)

        in_parts(finish_part, len(images), size=max(1, PART // images[0].numel()))
        return finished

    def _finish_pictures(
        self, images: Tensor, on_bytes: Steps, on_floats: Steps, finished: Tensor, rows: slice
    ) -> None:
        """Finish some images one by one: each stays in a core's cache from its bytes to its normalised floats."""
        for row in range(len(images))[rows]:
            picture, out = images[row : row + 1], finished[row : row + 1]
            for operation, arguments in on_bytes:
                picture = operation(picture, *arguments[row])
            floats = self._unit_range(picture, out)
            for operation, arguments in on_floats:
                floats = operation(floats, *arguments[row])
            floats.sub_(self.mean).div_(self.std)
            if floats is not out:
                out.copy_(floats)

    def _draw(self, images: Tensor, keys: Tensor | None) -> list[tuple[Tensor, ...]]:
        """What each operation draws for each image; empty without keys."""
        return [] if self.augment is None or keys is None else self.augment.draw(keys, *images.shape[2:])

    def _finished(self, images: Tensor, drawn: Sequence[Sequence[Tensor]], out: Tensor | None = None) -> Tensor:
        """The images augmented and normalised; in `out`, if nothing but normalising is left to do."""
        floats = self._unit_range(images, out)
        if self.augment is not None and drawn:
            floats = self.augment(floats, drawn)
        return floats.sub_(self.mean).div_(self.std)

    def _unit_range(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """Images as floats of 0…1, in `out` if it fits."""
        if images.dtype != torch.uint8:
            return images * self.std + self.mean
        if out is None or out.shape != images.shape:
            out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        return out.copy_(images).div_(self.white)

    def mixed(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and augment a whole batch with an augmentation that mixes images, such as mixup.

        Args:
            labels: int64 `[B]`, negative for images that are padding.
            keys: int64 `[B]`, from the method `keys`.

        Returns:
            The images, and their class probabilities, float32 `[B, classes]`, which `cross_entropy` takes; for padding
            they are zero. Raises as `forward`.
        """
        if self.augment is None or not self.mixes:
            raise ConfigError("this augmentation does not mix images; call Preprocess itself")
        if self.classes is None:
            raise ConfigError("mixing makes class probabilities: pass Preprocess a split, or the number of classes=")
        return self.mixed_on_floats(*self.on_bytes(images, keys), labels, keys)

    def mixed_on_floats(
        self, images: Tensor, keys: Tensor | None, labels: Tensor, mixing_keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The second part of `mixed`, after `on_bytes`; `mixing_keys` are those of all images."""
        assert self.augment is not None
        assert self.classes is not None
        return self.augment.mix(self.on_floats(images, keys), labels, mixing_keys, self.classes)

    @property
    def mixes(self) -> bool:
        """Whether the augmentation mixes images and their labels."""
        return self.augment is not None and self.augment.mixes

    def keys(self, sampler: EpochSampler, epoch: int, start: int = 0) -> Iterator[Tensor | None]:
        """The random key of each image, per batch of an epoch from `start` on; None without augmentation."""
        if self.augment is None:
            return repeat(None)
        return iter(augment_keys(sampler, epoch, self.mean.device, start).split(sampler.batch_size))
