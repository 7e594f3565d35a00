"""What a loader promises: the docstring of each function is the promise in words.

A promise returns what was checked; it raises `Broken` with the evidence, or `Unchecked` with the reason.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch.utils._pytree import tree_leaves

from vitmnist.auditing.leftovers import left_since, running
from vitmnist.auditing.subject import START, BatchCopy, Broken, ProbeDataset, Subject, Unchecked, start_epoch
from vitmnist.data.seeding import GENERATORS, changed_generators, generator_states, seed_generators

WORKERS = 2
RANKS = 2


def each_index_once(subject: Subject) -> str:
    """an epoch has every index once"""
    orders = _orders(subject)
    missing = [_missing(subject, {f"epoch {number}": epoch}) for number, epoch in enumerate(subject.epochs)]
    # A dropped batch has other samples if the order is another one.
    if missing[0] and missing[0] == missing[1] and orders[0] != orders[1]:
        raise Broken(f"index {missing[0][0]} never came in epochs 0 and 1, whose orders differ")
    dropped = f"; a short last batch is dropped ({len(missing[0])} samples)" if missing[0] else ""
    return f"{len(subject.data)} samples, {len(subject.epochs[0])} batches{dropped}"


def order_differs(subject: Subject) -> str:
    """epochs have different orders"""
    first, second = _orders(subject)
    if first == second:
        raise Broken(f"epochs 0 and 1 have the same order: {', '.join(map(str, first[:5]))}, …")
    return "epochs 0 and 1"


def same_batches(subject: Subject) -> str:
    """batches depend on the seed and the epoch alone"""
    if not subject.variants:
        raise Unchecked("the factory takes no num_workers")
    for variant, settings in subject.variants.items():
        for number, found in enumerate(subject.read_epochs(**settings)):
            subject.compare(found, number, context=f"{variant}: ", **settings)
    return f"{', '.join(subject.variants)}, 2 epochs"


def resumes_exactly(subject: Subject) -> str:
    """a resumed epoch neither skips nor repeats"""
    size = _size(subject)
    middle = size // 2
    with subject.open(epochs=2) as loader:
        if not callable(getattr(loader, "epoch", None)):
            subject.compare(_loaded(subject, loader, middle), 1, middle)
            return f"load_state_dict at epoch 1, batch {middle} of {size}"
        jumps = [(1, middle), (1, 0), (0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (1, size - 1), (1, size)]
        past = [(2, 0)] if subject.define else []  # an epoch that `epochs=2` did not announce
        for number, start in jumps + past:
            rest = subject.read(loader.epoch(number, start), number, start)
            subject.compare(rest, number, start, f"epoch({number}, {start}): ")
    return f"epoch(1, {middle}) of {size} batches"


def independent_iterators(subject: Subject) -> str:
    """iterators do not disturb each other, and keep their loader alive"""
    _ = subject.epochs  # raises if one does not end
    loader = subject.new()
    if not callable(getattr(loader, "epoch", None)):
        raise Unchecked("the loader has no epoch(number, start)")
    next(iter(loader.epoch(2)), None)
    iterators = [map(subject.copy, loader.epoch(number)) for number in (0, 1)]
    del loader
    gc.collect()
    pairs = list(zip_longest(*iterators))
    for number in (0, 1):
        subject.compare([pair[number] for pair in pairs if pair[number]], number)
    return "epochs 0 and 1 in turn, epoch 2 abandoned"


def batches_are_kept(subject: Subject) -> str:
    """a batch that is kept is not overwritten"""
    _ = subject.epochs  # raises if one does not end
    copies = []
    with subject.open() as loader:
        for batch in list(start_epoch(loader, 0)):
            copies.append(subject.copy(batch))
            if subject.define:  # nor does writing into it change another one, or the set
                for tensor in tree_leaves(batch):
                    tensor.zero_()
        subject.compare(copies, 0)
        if subject.define:
            subject.compare(subject.read(loader.epoch(0), 0), 0, context="after writing into batches: ")
    return f"{len(copies)} batches"


def ranks_are_disjoint(subject: Subject) -> str:
    """ranks do not overlap and cover the set"""
    if not {"rank", "world_size"} <= set(subject.settings):
        raise Unchecked("the factory takes no rank and world_size")
    parts = {f"rank {rank}": subject.read_epochs(1, rank=rank, world_size=RANKS)[0] for rank in range(RANKS)}
    # To give all ranks the same number of samples, samplers repeat or drop fewer samples than there are ranks.
    _missing(subject, parts, tolerance=RANKS - 1)
    return f"{RANKS} ranks"


def streams_are_independent(subject: Subject) -> str:
    """samples do not share random numbers"""
    _orders(subject)
    if not subject.data.is_random:
        raise Unchecked("the loader does not take random samples")
    _size(subject)
    owners: dict[tuple[str, float], tuple[int, int]] = {}  # the epoch and index that got a number
    for number, epoch in enumerate(subject.epochs):
        for indices, noise in epoch:
            if noise is None:
                raise Unchecked("the batches do not have the random numbers of the samples")
            for index, row in zip(indices.tolist(), noise.tolist(), strict=True):
                for drawn in zip(GENERATORS, row, strict=True):
                    first = owners.setdefault(drawn, (number, index))
                    if first != (number, index):  # an index that comes twice in an epoch may be the same sample
                        found = f"epoch {first[0]}, index {first[1]} and epoch {number}, index {index}"
                        raise Broken(f"{drawn[0]}: the same number for {found}")
    return f"{', '.join(GENERATORS)}; 2 epochs"


def generators_left_alone(subject: Subject) -> str:
    """the global random generators are left alone"""
    seed_generators(*START)
    before = generator_states()
    subject.read_epochs(1, num_workers=0)
    if changed := changed_generators(before):
        raise Broken(f"used: {', '.join(changed)}")
    return ", ".join(GENERATORS)


def nothing_left_behind(subject: Subject) -> str:
    """an abandoned epoch and a closed loader leave nothing running"""
    kept: Iterator[Any] = iter(())
    before = running()
    with subject.open(epochs=2) as loader:
        next(start_epoch(loader, 0), None)
        if subject.define:
            kept = loader.epoch(1)
            next(kept)
            subject.read(loader.epoch(0), 0)
    del loader  # without `close`, the garbage collector has to end what it started
    left = left_since(before)
    if next(kept, None) is not None:
        raise Broken("an iterator of the closed loader continued")
    if subject.define:  # a loader that nobody closed
        subject.read(start_epoch(subject.new(epochs=2), 0), 0)
        left += left_since(before)
    if left:
        raise Broken(f"left: {', '.join(left)}")
    return "no thread and no process"


PROMISES: list[Callable[[Subject], str]] = [
    *(each_index_once, order_differs, same_batches, resumes_exactly, independent_iterators, batches_are_kept),
    *(ranks_are_disjoint, streams_are_independent, generators_left_alone, nothing_left_behind),
]


def _orders(subject: Subject) -> list[list[int]]:
    """The indices of epochs 0 and 1."""
    if not isinstance(subject.data, ProbeDataset):
        raise Unchecked("the labels are not the indices of the samples")
    return [[index for indices, _ in epoch for index in indices.tolist()] for epoch in subject.epochs]


def _size(subject: Subject) -> int:
    """The number of batches in an epoch."""
    if len(subject.epochs[1]) < WORKERS:
        raise Unchecked(f"an epoch has a single batch; audit more than {len(subject.data)} samples")
    return len(subject.epochs[1])


def _loaded(subject: Subject, loader: Any, start: int) -> list[BatchCopy]:
    """The batches of epoch 1 from batch `start` on, from a new loader that loads the state of this one."""
    if not hasattr(loader, "load_state_dict"):
        raise Unchecked("the loader has neither epoch(number, start) nor load_state_dict")
    subject.read(start_epoch(loader, 0), 0)
    batches = start_epoch(loader, 1)
    for _ in range(start):
        next(batches, None)
    with subject.open() as other:
        other.load_state_dict(loader.state_dict())
        return subject.read(start_epoch(other, 1), 1, start)


def _missing(subject: Subject, parts: Mapping[str, list[BatchCopy]], tolerance: int = 0) -> list[int]:
    """The indices that never came; raises if these (unless dropped in batches) or repeated ones exceed `tolerance`."""
    counts = Counter(index for part in parts.values() for indices, _ in part for index in indices.tolist())
    repeated = [index for index, count in counts.items() if count > 1]
    if len(repeated) > tolerance:
        raise Broken(f"{', '.join(parts)}: index {repeated[0]} came twice; such indices: {len(repeated)}")
    missing = sorted({*range(len(subject.data))} - {*counts})
    # Each worker of each rank may leave out a last batch shorter than the others.
    sizes = {len(indices) for part in parts.values() for indices, _ in part}
    droppers = len(parts) * max(subject.settings.get("num_workers", 1), 1)
    if len(missing) > tolerance and (len(sizes) > 1 or len(missing) >= sizes.pop() * droppers):
        raise Broken(f"{', '.join(parts)}: index {missing[0]} never came; such indices: {len(missing)}")
    return missing
