"""The properties that `audit` checks: the docstring of each function is the property in words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from vitmnist.data.seeding import GENERATORS, changed_generators, generator_states
from vitmnist.diagnosis.audit_case import (
    WORKERS,
    Case,
    Epoch,
    index_difference,
    noise_difference,
    read_epoch,
    start_epoch,
)
from vitmnist.runtime.leftovers import left_since, running

Status = Literal["ok", "FAILED", "not checked"]
Finding = tuple[Status, str]

RANKS = 2
RESUMED = 1  # the epoch; epoch 0 could be right by being the default


def each_index_once(case: Case) -> Finding:
    """an epoch has every index once"""
    missing = []
    for epoch in case.epochs:
        for index, (_, first), (_, again) in _repeated(epoch):
            return "FAILED", f"epoch {epoch.number}, batch {again}: index {index} came twice, first in batch {first}"
        missing.append(_missing(case, epoch.indices))
        if missing[-1] and not _are_dropped(missing[-1], case, epoch):
            return "FAILED", f"epoch {epoch.number}: {_never(missing[-1])}"
    # A dropped batch has other samples if the order is another one.
    if missing[0] and missing[0] == missing[1] and case.epochs[0].indices != case.epochs[1].indices:
        return "FAILED", f"epochs 0 and 1, in different orders: {_never(missing[0])}"
    return "ok", f"{case.samples} samples, {len(case.epochs[0].batches)} batches" + _dropped(len(missing[-1]))


def order_differs(case: Case) -> Finding:
    """epochs have different orders"""
    first, second = case.epochs
    if first.indices == second.indices:
        start = ", ".join(map(str, first.indices[:5]))
        return "FAILED", f"epochs 0 and 1 have the same order: {start}, …"
    return "ok", "epochs 0 and 1"


def independent_of_workers(case: Case) -> Finding:
    """batches do not depend on the number of workers"""
    if "num_workers" not in case.declared:
        return "not checked", "the factory takes no num_workers"
    alone, parallel = case.read_epochs(num_workers=0), case.epochs
    differences = [
        next(filter(None, map(compare, alone, parallel)), "") for compare in (index_difference, noise_difference)
    ]
    workers = f"0 and {WORKERS} workers"
    if any(differences):
        return "FAILED", f"{workers}: {'; '.join(sorted(filter(None, differences)))}"
    compared = "indices" if case.refusal or alone[0].noise is None else "indices and random numbers"
    return "ok", f"{workers}, 2 epochs, {compared}"


def resumes_exactly(case: Case) -> Finding:
    """a resumed epoch neither skips nor repeats"""
    expected = case.epochs[RESUMED]
    start = len(expected.batches) // 2
    if not start:
        return "not checked", _too_few(case)
    resumed = _resume(case, start)
    if resumed is None:
        return "not checked", (
            "the loader has neither epoch(number, start) nor load_state_dict, and its iterator no set_state"
        )
    method, found = resumed
    method = f"{method} at epoch {RESUMED}, batch {start} of {len(expected.batches)}"
    tail = expected.tail(start)
    if difference := index_difference(tail, found):
        return "FAILED", f"{method}: {difference}"
    noise = noise_difference(tail, found)
    return "ok", method + (noise and f"; but {noise}")


def ranks_are_disjoint(case: Case) -> Finding:
    """ranks do not overlap and cover the set"""
    if undeclared := [name for name in ("rank", "world_size") if name not in case.declared]:
        return "not checked", f"the factory takes no {' and no '.join(undeclared)}"
    epochs = [case.read_epochs(1, rank=rank, world_size=RANKS)[0] for rank in range(RANKS)]
    repeated = [
        f"index {index} is on rank {rank} (batch {batch}) and rank {other} (batch {other_batch})"
        for index, (rank, batch), (other, other_batch) in _repeated(*epochs)
    ]
    if len(repeated) >= RANKS:
        return "FAILED", f"epoch 0: {repeated[0]}; {len(repeated)} indices came twice"
    missing = _missing(case, [index for epoch in epochs for index in epoch.indices])
    if len(missing) >= RANKS and not _are_dropped(missing, case, *epochs):
        return "FAILED", f"epoch 0: {_never(missing)}, on no rank"
    # So that all ranks have as many samples, samplers repeat or leave out fewer than there are ranks.
    evened = repeated or [f"index {index} is on no rank" for index in missing if len(missing) < RANKS]
    return "ok", f"{RANKS} ranks" + (f"; to make them equally long, {evened[0]}" if evened else _dropped(len(missing)))


def streams_are_independent(case: Case) -> Finding:
    """samples do not share random numbers"""
    if case.refusal:
        return "not checked", f"the loader does not take random samples: {case.refusal}"
    first: dict[tuple[str, float], tuple[int, int, str]] = {}  # the sample that a generator gave a number
    for epoch in case.epochs:
        if epoch.noise is None:
            return "not checked", "the batches do not have the noise of the samples"
        for index, place, row in zip(epoch.indices, epoch.places, epoch.noise.tolist(), strict=True):
            for generator, value in zip(GENERATORS, row, strict=True):
                number, other, other_place = first.setdefault((generator, value), (epoch.number, index, place))
                # An index that comes twice in an epoch may be the same sample.
                if (number, other) != (epoch.number, index):
                    places = f"{other_place}, index {other} and {place}, index {index}"
                    return "FAILED", f"{generator}: the same number for {places}"
    if len(case.epochs[0].batches) < WORKERS:
        return "not checked", _too_few(case)
    return "ok", f"{', '.join(GENERATORS)}; 2 epochs"


def generators_left_alone(case: Case) -> Finding:
    """the global random generators are left alone"""
    used = []
    for workers in (0, WORKERS) if "num_workers" in case.declared else (None,):
        case.seed_generators()
        before = generator_states()
        case.read_epochs(1, **({} if workers is None else {"num_workers": workers}))
        if changed := changed_generators(before):
            used.append(", ".join(changed) + ("" if workers is None else f" with {workers} workers"))
    return ("FAILED", f"used: {'; '.join(used)}") if used else ("ok", ", ".join(GENERATORS))


def nothing_left_behind(case: Case) -> Finding:
    """an abandoned epoch and a closed loader leave nothing running"""
    before = running()
    with case.open() as loader:
        batches = start_epoch(loader, 0)
        next(batches, None)
        del batches
    del loader  # without `close`, the garbage collector has to end what it started
    left = left_since(before)
    return ("FAILED", f"left: {', '.join(left)}") if left else ("ok", "no thread and no process")


CHECKS: tuple[Callable[[Case], Finding], ...] = (
    each_index_once,
    order_differs,
    independent_of_workers,
    resumes_exactly,
    ranks_are_disjoint,
    streams_are_independent,
    generators_left_alone,
    nothing_left_behind,
)


def _resume(case: Case, start: int) -> tuple[str, Epoch] | None:
    """How the loader resumes, and what it then delivers of an epoch; None if it cannot resume."""

    def read(batches: Iterator[Any]) -> Epoch:
        return read_epoch(batches, RESUMED, case.samples, first_batch=start)

    with case.open() as loader:
        if callable(getattr(loader, "epoch", None)):
            return "epoch(number, start)", read(iter(loader.epoch(RESUMED, start)))
        for number in range(RESUMED):
            read_epoch(start_epoch(loader, number), number, case.samples)
        batches: Any = start_epoch(loader, RESUMED)  # that of grain is more than an iterator
        for _ in range(start):
            next(batches, None)
        if hasattr(loader, "load_state_dict"):
            method, state = "load_state_dict", loader.state_dict()
        elif hasattr(batches, "set_state"):
            method, state = "set_state", batches.get_state()
        else:
            return None
    with case.open() as loader:
        if method == "load_state_dict":
            loader.load_state_dict(state)
        batches = start_epoch(loader, RESUMED)
        if method == "set_state":
            batches.set_state(state)
        return method, read(batches)


def _too_few(case: Case) -> str:
    return f"an epoch has a single batch; audit more than {case.samples} samples"


def _repeated(*epochs: Epoch) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Each index that comes again, and its first and second place: the position of the epoch, and the batch."""
    first: dict[int, tuple[int, int]] = {}
    for position, epoch in enumerate(epochs):
        for number, batch in enumerate(epoch.batches):
            for index in batch:
                if index in first:
                    yield index, first[index], (position, number)
                first.setdefault(index, (position, number))


def _missing(case: Case, found: Collection[int]) -> list[int]:
    return sorted({*range(case.samples)} - {*found})


def _are_dropped(missing: Sequence[int], case: Case, *epochs: Epoch) -> bool:
    """Whether each worker of each rank may have left out a last batch shorter than the others."""
    sizes = {len(batch) for epoch in epochs for batch in epoch.batches}
    droppers = len(epochs) * max(case.settings().get("num_workers", 1), 1)
    return len(sizes) == 1 and len(missing) < sizes.pop() * droppers


def _never(missing: Sequence[int]) -> str:
    return f"index {missing[0]} never came" + (f", nor did {len(missing) - 1} others" if len(missing) > 1 else "")


def _dropped(count: int) -> str:
    return f"; a short last batch is dropped ({count} samples)" if count else ""
