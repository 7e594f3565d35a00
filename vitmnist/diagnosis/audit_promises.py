"""What a loader promises: the docstring of each function is the promise in words.

A promise returns what was checked; it raises an error with the evidence if broken, with the reason if unchecked.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch.utils._pytree import tree_leaves

from vitmnist.data.seeding import GENERATORS, changed_generators, generator_states, seed_generators
from vitmnist.diagnosis.audit_subject import START, Batch, Broken, ProbeDataset, Subject, Unchecked, start_epoch
from vitmnist.runtime.leftovers import left_since, running

WORKERS = 2
RANKS = 2
RESUMED = 1  # the epoch; epoch 0 could be right by being the default


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
        epochs = subject.read_epochs(**settings)
        for number, found in enumerate(epochs):
            subject.compare(found, number, context=f"{variant}: ", **settings)
    is_random = epochs[0][0][1] is not None and not getattr(subject.data, "refusal", "")
    compared = "indices and random numbers" if is_random else "indices"
    return f"{', '.join(subject.variants)}, 2 epochs, {compared}"


def resumes_exactly(subject: Subject) -> str:
    """a resumed epoch neither skips nor repeats"""
    size = len(subject.epochs[RESUMED])
    middle = size // 2
    if not middle:
        raise Unchecked(_too_few(subject))
    jumps = [(1, 0), (0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (1, size - 1), (1, size)]
    past = [(2, 0)] if subject.define else []  # of two epochs, the next of which may have begun early
    with subject.open(epochs=2) as loader:
        has_epoch = callable(getattr(loader, "epoch", None))
        for number, start in [(RESUMED, middle), *(jumps + past if has_epoch else [])]:
            method, rest = _rest(subject, loader, number, start)
            subject.compare(rest, number, start, f"{method} at epoch {number}, batch {start} of {size}: ")
    return f"{method} at epoch {RESUMED}, batch {middle} of {size}"


def independent_iterators(subject: Subject) -> str:
    """iterators do not disturb each other, and keep their loader alive"""
    _ = subject.epochs  # which end
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
    _ = subject.epochs  # which end
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
    if unknown := [name for name in ("rank", "world_size") if name not in subject.settings]:
        raise Unchecked(f"the factory takes no {' and no '.join(unknown)}")
    parts = {f"rank {rank}": subject.read_epochs(1, rank=rank, world_size=RANKS)[0] for rank in range(RANKS)}
    # So that all ranks have as many samples, samplers repeat or leave out fewer than there are ranks.
    _missing(subject, parts, tolerance=RANKS - 1)
    return f"{RANKS} ranks"


def streams_are_independent(subject: Subject) -> str:
    """samples do not share random numbers"""
    _orders(subject)
    if subject.data.refusal:
        raise Unchecked(f"the loader does not take random samples: {subject.data.refusal}")
    owners: dict[tuple[str, float], tuple[int, int]] = {}  # the epoch and index that got a number
    for number, epoch in enumerate(subject.epochs):
        for indices, noise in epoch:
            if noise is None:
                raise Unchecked("the batches do not have the noise of the samples")
            for index, row in zip(indices.tolist(), noise.tolist(), strict=True):
                for drawn in zip(GENERATORS, row, strict=True):
                    first = owners.setdefault(drawn, (number, index))
                    if first != (number, index):  # an index that comes twice in an epoch may be the same sample
                        found = f"epoch {first[0]}, index {first[1]} and epoch {number}, index {index}"
                        raise Broken(f"{drawn[0]}: the same number for {found}")
    if len(subject.epochs[0]) < WORKERS:
        raise Unchecked(_too_few(subject))
    return f"{', '.join(GENERATORS)}; 2 epochs"


def generators_left_alone(subject: Subject) -> str:
    """the global random generators are left alone"""
    used = []
    for workers in (0, WORKERS) if "num_workers" in subject.settings else (None,):
        seed_generators(*START)
        before = generator_states()
        subject.read_epochs(1, num_workers=workers)
        if changed := changed_generators(before):
            used.append(", ".join(changed) + ("" if workers is None else f" with {workers} workers"))
    if used:
        raise Broken(f"used: {'; '.join(used)}")
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


def _too_few(subject: Subject) -> str:
    return f"an epoch has a single batch; audit more than {len(subject.data)} samples"


def _rest(subject: Subject, loader: Any, number: int, start: int) -> tuple[str, list[Batch]]:
    """How a loader resumes, and its batches of epoch `number` from batch `start` on."""
    if callable(getattr(loader, "epoch", None)):
        return "epoch(number, start)", subject.read(loader.epoch(number, start), number, start)
    for earlier in range(number):
        subject.read(start_epoch(loader, earlier), earlier)
    batches: Any = start_epoch(loader, number)  # that of grain is more than an iterator
    for _ in range(start):
        next(batches, None)
    with subject.open() as other:
        if hasattr(loader, "load_state_dict"):
            other.load_state_dict(loader.state_dict())
            return "load_state_dict", subject.read(start_epoch(other, number), number, start)
        if hasattr(batches, "set_state"):
            rest: Any = start_epoch(other, number)
            rest.set_state(batches.get_state())
            return "set_state", subject.read(rest, number, start)
    raise Unchecked("the loader has neither epoch(number, start) nor load_state_dict, and its iterator no set_state")


def _missing(subject: Subject, parts: Mapping[str, list[Batch]], tolerance: int = 0) -> list[int]:
    """The indices that never came; raises for more than `tolerance`, unless batches were dropped, or repeated ones."""
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
