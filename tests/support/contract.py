"""The contract of a loader: it delivers the defined batches, in any order of requests, and leaves nothing behind."""

import gc
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from vitmnist.auditing import find_leftovers, find_running
from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import Data, DatasetSource, SampleSource, TensorSet, as_source
from vitmnist.loaders.base import Loader
from vitmnist.loaders.make_loader import make_loader
from vitmnist.runtime.random_state import RandomState
from vitmnist.store.tree import find_difference

BATCH_SIZE, SIZE, SEED = 5, 23, 7
Batch = tuple[Tensor, Tensor]


def part_of(data: SampleSource, size: int) -> SampleSource:
    """The first samples."""
    if isinstance(data, TensorSet):
        return data.subset(slice(size))
    return as_source(Subset(data.dataset, range(size)), SEED)


def classes_of(part: SampleSource) -> Tensor:
    """The labels of a split, or two classes of other samples, five and two in turns."""
    return part.labels if isinstance(part, Split) else torch.arange(len(part)) % 7 // 5


def check_contract(name: str, data: Data, *, device: str = "cpu", **options: Any) -> None:
    """Check every promise of the contract for the loader `name` over the first samples of `data`."""
    source = as_source(data, SEED)
    normalized = Preprocess(source) if isinstance(source, Split) else torch.nn.Identity()

    def build(part: SampleSource, **order: Any) -> Loader:
        if "balanced" in order.values():
            order["labels"] = classes_of(part)
        return make_loader(name, part, batch_size=BATCH_SIZE, seed=SEED, device=device, **order, **options)

    def copy(batch: Batch) -> Batch:
        """Normalise the images as the model does. `disk` with workers delivers normalised images."""
        assert {part.device.type for part in batch} == {torch.device(device).type}
        return normalized(batch[0].cpu()).clone(), batch[1].cpu().clone()

    def check(batches: Any, part: SampleSource, epoch: int, start: int = 0, **order: Any) -> None:
        values = {"shuffle": "sample", "drop_last": False, **order}
        sampler = EpochSampler(len(part), BATCH_SIZE, seed=SEED, labels=classes_of(part), **values)
        ids = iter(sampler.sample_ids(epoch, start).tolist())
        for indices, batch in zip_longest(sampler.batch_indices(epoch, start), batches):
            rows = torch.arange(len(part))[indices].tolist()
            own = [next(ids) for _ in rows] if isinstance(part, DatasetSource) else rows
            samples = [part.read(torch.tensor([sample_id]), epoch) for sample_id in own]
            expected = [torch.cat(column).to(device) for column in zip(*samples, strict=True)]
            assert not find_difference(copy(batch), copy(expected)), (epoch, start, rows, order)

    sizes = [SIZE, 1, BATCH_SIZE, BATCH_SIZE + 1]
    if isinstance(source, TensorSet) and name != "auto":  # `auto` times a batch, and a dataset has at least a sample.
        sizes.append(0)
    orders: list[dict[str, Any]] = [{"shuffle": order} for order in Shuffle]
    for size, order in [(size, {}) for size in sizes] + [(SIZE, {**order, "drop_last": True}) for order in orders]:
        part = part_of(source, size)
        with build(part, **order) as loader:
            check(loader.epoch(1), part, 1, **order)
            assert len(loader) == sum(1 for _ in loader.epoch(0))
    part = part_of(source, SIZE)
    before, random_state = find_running(), RandomState()
    with build(part) as loader:
        middle, size = len(loader) // 2, len(loader)
        for epoch, start in [(1, middle), (1, 0), (0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (1, size), (2, 0)]:
            check(loader.epoch(epoch, start), part, epoch, start)
        kept = list(loader.epoch(0))
        check(kept, part, 0)
        for tensor in [tensor for batch in kept for tensor in batch]:
            tensor.zero_()  # This must change neither another batch nor the dataset.
        check(loader.epoch(0), part, 0)
    assert not random_state.list_changed()
    loader = build(part)
    next(loader.epoch(2))
    first, second = loader.epoch(0), loader.epoch(1)
    del loader  # The iterators keep it alive.
    gc.collect()
    pairs = list(zip(first, second, strict=True))
    check([pair[0] for pair in pairs], part, 0)
    check([pair[1] for pair in pairs], part, 1)
    with build(part) as loader:
        abandoned = loader.epoch(1)
        next(abandoned)
    assert next(abandoned, None) is None
    del loader, first, second
    assert not find_leftovers(before)
