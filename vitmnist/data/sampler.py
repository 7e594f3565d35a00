"""The order of the samples in an epoch. Every loader takes its indices from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import numpy as np
import torch
from torch import Tensor

from vitmnist.errors import ConfigError, suggest_names

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class EpochSampler:
    """A pure function from (seed, epoch) to batches, drawn on the CPU so that every device gets the same order.

    With several ranks, each gets a part of every batch, and together they see the batches of a single process. All
    ranks take the same number of steps: if the last batch has too few images, a rank without images gets the first
    one as padding. `num_rank_images` does not count it, and training replaces its label by a negative one.

    Override `draw_order` to change the order for all loaders and the augmentation.

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
        labels: the label of each image, an integer tensor `[size]`; only `balanced` uses it.

    Raises:
        ConfigError: a value is out of bounds, or does not fit the others.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: str = "sample"
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        from vitmnist.config.schema import Shuffle  # Not at the top: it imports OmegaConf.

        orders = [order.value for order in Shuffle]
        if self.shuffle not in orders:
            raise ConfigError(f"shuffle={self.shuffle}: {suggest_names(str(self.shuffle), orders)}")
        if not isinstance(self.drop_last, bool):  # The text "false" would be true.
            raise ConfigError(f"drop_last={self.drop_last}: must be True or False")
        for key, minimum in (("batch_size", 1), ("seed", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < minimum:
                raise ConfigError(f"{key}={value}: must be a whole number, at least {minimum}")
            object.__setattr__(self, key, index(value))  # Integers of NumPy would overflow.
        if self.world_size > self.batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size}: {self.world_size} processes train together, and each must have an "
                f"image of every batch; set batch_size={self.world_size} or more, or start fewer"
            )
        if self.drop_last and 0 < self.size < self.batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} exceeds the {self.size} images, so drop_last=true leaves no batch; set "
                f"batch_size={self.size} or less, or drop_last=false"
            )
        labels = self.labels
        has_classes = isinstance(labels, Tensor) and labels.shape == (self.size,) and not labels.is_floating_point()
        if self.shuffle == Shuffle.balanced and not has_classes:
            raise ConfigError(
                "shuffle=balanced: needs the class of each image; give make_loader a split, a pair (images, labels) "
                f"with int64 labels [{self.size}], or such labels="
            )

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
        """Number of images in this rank's part of a batch, without padding."""
        return len(self._rank_rows(self.num_images(batch_index)))

    def draw_order(self, epoch: int) -> Tensor:
        """Draw the sample IDs of an epoch, int64 `[size]` on the CPU; `batch_size` consecutive ones form a batch.

        The ID of a sample is its index in the dataset, plus a different multiple of `size` for each repetition in the
        epoch. Random numbers depend on the ID, so each repetition of an image by `balanced` gets different ones.
        """
        # Torch's CPU generator uses 32 bits of a seed: with seed + epoch, or with both concatenated, different runs
        # would share epochs. SeedSequence mixes both well, and NumPy guarantees that its output is stable.
        (mixed,) = np.random.SeedSequence(self.seed, spawn_key=(epoch,)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed))
        if self.shuffle in ("batch", "none"):
            order = torch.arange(self.size, device=CPU)
            if self.shuffle == "batch":
                blocks = order[: self.size - self.size % self.batch_size].view(-1, self.batch_size)
                blocks[:] = blocks[torch.randperm(len(blocks), generator=generator, device=CPU)]
            return order
        permutation = torch.randperm(self.size, generator=generator, device=CPU)
        if self.shuffle != "balanced" or self.labels is None:
            return permutation
        return _balance(permutation, self.labels.detach().cpu(), generator)

    def sample_ids(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Return the IDs of this rank's samples from batch `start` on, int64 on `device`; see `draw_order`.

        Every batch but the last has `rank_batch_size` of them. Do not modify the result.

        Raises:
            ValueError: `start` is neither a batch of the epoch nor its end.
        """
        order = _cached_order(self, epoch, torch.device(device))
        return torch.cat([order[:0], *(order[rows] for rows in self._rank_positions(start))])

    def batch_indices(self, epoch: int, start: int = 0, device: torch.device | str = "cpu") -> Iterator[slice | Tensor]:
        """Yield the indices of each batch from batch `start` on: slices for `batch` and `none`, else int64 `[B]`.

        The indices of any other order, including that of a subclass, are moved to `device` once, and batches are views
        of them. Raises the errors of `sample_ids`.
        """
        is_in_blocks = self.shuffle in ("batch", "none") and type(self).draw_order is EpochSampler.draw_order
        indices = _cached_order(self, epoch, CPU if is_in_blocks else torch.device(device)) % self.size
        for rows in self._rank_positions(start):
            if is_in_blocks:
                first = int(indices[rows.start])
                yield slice(first, first + rows.stop - rows.start)
            else:
                yield indices[rows]

    def _rank_positions(self, start: int) -> Iterator[slice]:
        """Yield the positions of this rank's part of each batch in the order of an epoch."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: an epoch has {len(self)} batches")
        for batch_index in range(start, len(self)):
            first = batch_index * self.batch_size
            rows = self._rank_rows(self.num_images(batch_index)) or range(1)  # `range(1)` is padding.
            yield slice(first + rows.start, first + rows.stop)

    def _rank_rows(self, count: int) -> range:
        """Return the rows of a batch of `count` images for this rank. The first ranks get one more."""
        quotient, remainder = divmod(count, self.world_size)
        start = self.rank * quotient + min(self.rank, remainder)
        return range(start, start + quotient + (self.rank < remainder))


@lru_cache(maxsize=4)  # Loader and augmentation need the same order; drawing 60,000 sample IDs takes 1 ms.
def _cached_order(sampler: EpochSampler, epoch: int, device: torch.device) -> Tensor:
    """Return the order of an epoch on a device. Do not modify the result."""
    return sampler.draw_order(epoch) if device == CPU else _cached_order(sampler, epoch, CPU).to(device)


def _balance(shuffled: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw equally many images of each class, in random order: the sample IDs of an epoch, int64 `[N]`."""
    _, class_indices, counts = labels.unique(return_inverse=True, return_counts=True)
    by_class = shuffled[class_indices[shuffled].argsort(stable=True)].split(counts.tolist())
    quota, rest = divmod(len(shuffled), max(len(counts), 1))
    quotas = torch.full_like(counts, quota)
    # The classes that get one image more differ from epoch to epoch.
    quotas[torch.randperm(len(counts), generator=generator, device=CPU)[:rest]] += 1
    sample_ids = [shuffled[:0]]
    for images, count in zip(by_class, quotas.tolist(), strict=True):
        positions = torch.arange(count, device=CPU)
        sample_ids.append(images[positions % len(images)] + positions // len(images) * len(shuffled))
    return torch.cat(sample_ids)[torch.randperm(len(shuffled), generator=generator, device=CPU)]
