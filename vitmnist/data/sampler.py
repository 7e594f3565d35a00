"""The order of the samples in an epoch. Every loader takes its indices from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index

import numpy as np
import torch
from torch import Tensor

from vitmnist.data.sources import hash_tensor
from vitmnist.errors import ConfigError, suggest_names

CPU = torch.device("cpu")


def build_sampler(
    size: int,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: str,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    labels: Tensor | None = None,
) -> EpochSampler:
    """Build an `EpochSampler` for training, for evaluation, or for `make_loader`; the arguments are its fields.

    Raises:
        ConfigError: a value is out of bounds, `batch_size` is below `world_size`, `drop_last` leaves no batch, or
            `shuffle` is balanced, and `labels` are not a whole number for each image.
    """
    from vitmnist.config.schema import Shuffle  # Not at the top: it imports OmegaConf.

    orders = [order.value for order in Shuffle]
    if shuffle not in orders:
        raise ConfigError(f"shuffle={shuffle}: {suggest_names(str(shuffle), orders)}")
    if not isinstance(drop_last, bool):  # The text "false" would be true.
        raise ConfigError(f"drop_last={drop_last}: must be True or False")
    for key, value, minimum in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        # The integers of NumPy have `__index__` too.
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < minimum:
            raise ConfigError(f"{key}={value}: must be a whole number, at least {minimum}")
    if world_size > batch_size:
        raise ConfigError(
            f"batch_size={batch_size}: {world_size} processes train together, and each must have an image of every "
            f"batch; set batch_size={world_size} or more, or start fewer"
        )
    if drop_last and 0 < size < batch_size:
        raise ConfigError(
            f"batch_size={batch_size} exceeds the {size} images, so drop_last=true leaves no batch; set "
            f"batch_size={size} or less, or drop_last=false"
        )
    classes = None
    if shuffle == Shuffle.balanced:
        if not isinstance(labels, Tensor) or labels.shape != (size,) or labels.is_floating_point():
            raise ConfigError(
                "shuffle=balanced: needs the class of each image; give make_loader a split, a pair (images, labels) "
                f"with int64 labels [{size}], or such labels="
            )
        labels = labels.detach().cpu()
        classes = Classes(labels, hash_tensor(labels))
    return EpochSampler(size, index(batch_size), index(seed), shuffle, drop_last, rank, world_size, classes)


@dataclass(frozen=True)
class Classes:
    """The label of each image, int64 `[N]` on the CPU, and a digest by which samplers compare it."""

    labels: Tensor = field(compare=False)
    digest: str


@dataclass(frozen=True)
class EpochSampler:
    """A pure function from (seed, epoch) to batches, drawn on the CPU so that every device gets the same order.

    With several ranks, each gets a part of every batch, and together they see the batches of a single process. If the
    last batch has fewer images than there are ranks, a rank without images receives one image of padding, so that all
    ranks take the same number of steps.

    Args:
        size: number of images in the dataset.
        batch_size: number of images in a batch, of all ranks together; at least `world_size`.
        seed: determines the order of all epochs; at least 0.
        shuffle: `sample` permutes all images. `batch` permutes contiguous blocks, as in the article; the blocks are the
            same in every epoch, and a short block stays last. `none` keeps the order of the dataset. `balanced` draws
            `size` images, equally many of each class, and each image of a class equally often, up to one draw. The
            remainder goes to classes drawn for the epoch.
        drop_last: leave out a last batch shorter than `batch_size`.
        rank: the rank of this process.
        world_size: number of ranks.
        classes: the classes of the images, for `balanced` alone.
    """

    size: int
    batch_size: int
    seed: int
    shuffle: str = "sample"
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    classes: Classes | None = None

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        full, rest = divmod(self.size, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def rank_batch_size(self) -> int:
        """Number of images in this rank's part of a full batch."""
        return len(self._rank_rows(self.batch_size))

    def num_images(self, batch_index: int) -> int:
        """Number of images in a batch of the epoch, of all ranks together."""
        return min(self.batch_size, self.size - batch_index * self.batch_size)

    def num_rank_images(self, batch_index: int) -> int:
        """Number of images in this rank's part of a batch; 0 if its one image is padding."""
        return len(self._rank_rows(self.num_images(batch_index)))

    def batches(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[slice | Tensor]:
        """Yield the indices of each batch from batch `start` on: a slice if they are contiguous, else int64 `[B]`.

        An order other than `batch` and `none` is moved to `device` once, and its batches are views of it there.

        Raises:
            ValueError: `start` is neither a batch of the epoch nor its end.
        """
        slices = self._slices(epoch, start)
        if self.shuffle in ("batch", "none"):
            yield from slices
        else:
            indices = _draw_order(self, epoch, torch.device(device)) % self.size
            yield from (indices[rows] for rows in slices)

    def indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Return the concatenated indices of the batches from `start` on, int64 on `device`; see `batches`.

        Every batch but the last has `rank_batch_size` indices, since a short block stays last.
        """
        return self.draws(epoch, start, device) % self.size

    def draws(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Return `indices`, plus another multiple of `size` for each repetition of an image in the epoch.

        Random numbers of a sample depend on its draw, so an image that `balanced` repeats gets others.
        """
        order = _draw_order(self, epoch, torch.device(device))
        return torch.cat([order[:0], *(order[rows] for rows in self._slices(epoch, start))])

    def draw_ahead(self, epoch: int, device: torch.device) -> None:
        """Draw the order of an epoch before it begins, while the device still computes."""
        _draw_order(self, epoch, device)

    def _slices(self, epoch: int, start: int) -> Iterator[slice]:
        """Yield the rows of `_draw_order` in this rank's part of each batch; `batch` permutes the batches."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: an epoch has {len(self)} batches")
        blocks = list(range(len(self)))
        if self.shuffle == "batch":
            full = self.size // self.batch_size
            blocks[:full] = torch.randperm(full, generator=_generator(self.seed, epoch), device="cpu").tolist()
        for block in blocks[start:]:
            first = block * self.batch_size
            rows = self._rank_rows(self.num_images(block)) or range(1)
            yield slice(first + rows.start, first + rows.stop)

    def _rank_rows(self, count: int) -> range:
        """Return the rows of a batch of `count` images for this rank. The first ranks get one more."""
        quotient, remainder = divmod(count, self.world_size)
        start = self.rank * quotient + min(self.rank, remainder)
        return range(start, start + quotient + (self.rank < remainder))


@lru_cache(maxsize=4)  # Loader and augmentation need the same order; drawing 60,000 indices takes 1 ms.
def _draw_order(sampler: EpochSampler, epoch: int, device: torch.device) -> Tensor:
    """Return what `_slices` divides into batches, int64 `[size]`: the draws of the epoch. Do not modify the result."""
    if device.type != "cpu":
        return _draw_order(sampler, epoch, CPU).to(device)
    if sampler.shuffle in ("batch", "none"):
        return torch.arange(sampler.size, device=CPU)
    generator = _generator(sampler.seed, epoch)
    permutation = torch.randperm(sampler.size, generator=generator, device=CPU)
    return _balance(permutation, sampler.classes.labels, generator) if sampler.classes else permutation


def _balance(shuffled: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw as many images of each class, in random order: the `draws` of an epoch, int64 `[N]`."""
    _, label, counts = labels.unique(return_inverse=True, return_counts=True)
    by_class = shuffled[label[shuffled].argsort(stable=True)].split(counts.tolist())
    quota, rest = divmod(len(shuffled), max(len(counts), 1))
    quotas = torch.full_like(counts, quota)
    quotas[torch.randperm(len(counts), generator=generator, device="cpu")[:rest]] += 1
    draws = [shuffled[:0]]
    for images, count in zip(by_class, quotas.tolist(), strict=True):
        positions = torch.arange(count, device="cpu")
        draws.append(images[positions % len(images)] + positions // len(images) * len(shuffled))
    return torch.cat(draws)[torch.randperm(len(shuffled), generator=generator, device="cpu")]


def _generator(seed: int, epoch: int) -> torch.Generator:
    # Torch's CPU generator uses 32 bits of a seed: with seed + epoch, or with both concatenated, different runs would
    # share epochs. SeedSequence mixes both well, and NumPy guarantees that its output is stable.
    (mixed,) = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(1)
    return torch.Generator().manual_seed(int(mixed))
