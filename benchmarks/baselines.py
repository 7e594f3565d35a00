"""Other ways of loading tensors: a hand-written loop, torch's `DataLoader`, and other libraries."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from vitmnist.data.sources import TensorSet

Epoch = Callable[[int], Iterable[Any]]
"""Takes the number of an epoch, and yields its batches on the device."""


@dataclass(frozen=True)
class Target:
    """The batch size and the device of all candidates."""

    batch_size: int
    device: torch.device

    @property
    def pin_memory(self) -> bool:
        return self.device.type == "cuda"

    def index_batches(self, size: int, number: int) -> Iterator[Tensor]:
        """Yield batches of shuffled indices, as in a hand-written loop."""
        yield from torch.randperm(size, generator=torch.Generator().manual_seed(number)).split(self.batch_size)

    def upload(self, batches: Iterable[Any]) -> Iterator[Any]:
        for images, labels in batches:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def plain_loop(target: Target, tensors: TensorSet) -> Epoch:
    """`x[permutation[i:j]]`, the usual loop over tensors on the device."""
    images, labels = tensors.images.to(target.device), tensors.labels.to(target.device)

    def epoch(number: int) -> Iterator[Any]:
        permutation = torch.randperm(len(images), device=target.device)
        for start in range(0, len(images), target.batch_size):
            indices = permutation[start : start + target.batch_size]
            yield images[indices], labels[indices]

    return epoch


def per_sample(target: Target, dataset: data.Dataset[Any], num_workers: int) -> Epoch:
    """The usual `DataLoader`: one sample at a time, collated."""
    loader: data.DataLoader[Any] = data.DataLoader(
        dataset,
        target.batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=target.pin_memory,
    )
    return lambda number: target.upload(loader)


def per_batch(target: Target, dataset: data.Dataset[Any]) -> Epoch:
    """A `DataLoader` that indexes the dataset by the batch, as its documentation recommends."""
    loader: data.DataLoader[Any] = data.DataLoader(
        dataset, sampler=_batch_sampler(target, dataset), batch_size=None, pin_memory=target.pin_memory
    )
    return lambda number: target.upload(loader)


def torchdata_nodes(target: Target, tensors: TensorSet) -> Epoch:
    """torchdata nodes: two threads gather batches by index."""
    from torchdata import nodes

    dataset = data.TensorDataset(tensors.images, tensors.labels)
    source = nodes.SamplerWrapper(_batch_sampler(target, dataset))
    loader = nodes.Loader(nodes.ParallelMapper(source, dataset.__getitem__, num_workers=2, method="thread"))
    return lambda number: target.upload(loader)


def spdl_pipeline(target: Target, tensors: TensorSet) -> Epoch:
    """An SPDL pipeline: two threads gather batches by index."""
    from spdl.pipeline import PipelineBuilder

    def gather(indices: Tensor) -> tuple[Tensor, Tensor]:
        return tensors.images[indices], tensors.labels[indices]

    def epoch(number: int) -> Iterator[Any]:
        source = list(target.index_batches(len(tensors), number))
        builder: Any = PipelineBuilder()
        builder = builder.add_source(source).pipe(gather, concurrency=2).add_sink(3)
        pipeline = builder.build(num_threads=2)
        with pipeline.auto_stop():
            yield from target.upload(pipeline)

    return epoch


def tensordict(target: Target, tensors: TensorSet) -> Epoch:
    """A TensorDict on the device, indexed by the batch."""
    from tensordict import TensorDict

    content = {"images": tensors.images, "labels": tensors.labels}
    samples = TensorDict(content, batch_size=[len(tensors)]).to(target.device)

    def epoch(number: int) -> Iterator[Any]:
        for indices in target.index_batches(len(tensors), number):
            batch = samples[indices.to(target.device)]
            yield batch["images"], batch["labels"]

    return epoch


LIBRARIES = {
    "torchdata": ("torchdata nodes, 2 threads", torchdata_nodes),
    "spdl": ("spdl pipeline, 2 threads", spdl_pipeline),
    "tensordict": ("tensordict", tensordict),
}
"""Name and builder of a candidate, by package."""


def _batch_sampler(target: Target, dataset: data.Dataset[Any]) -> data.BatchSampler:
    return data.BatchSampler(data.RandomSampler(dataset), target.batch_size, drop_last=False)  # type: ignore[arg-type]
