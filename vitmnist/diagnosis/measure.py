"""Times a loader and a training step: alone, together, and with other loaders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import repeat
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vitmnist.data.collate import map_tensors
from vitmnist.data.from_dataloader import check_replaceable
from vitmnist.data.loaders.base import Loader
from vitmnist.data.loaders.timing import BLOCKS, Step, calling, time_batches
from vitmnist.data.seeding import preserved_generators
from vitmnist.diagnosis.alternatives import Candidate, Timed, WatchedStep, candidates, with_workers
from vitmnist.diagnosis.result import Diagnosis, Figure
from vitmnist.diagnosis.stream import BatchStream
from vitmnist.errors import ConfigError, DataError, UserError
from vitmnist.runtime.device import accelerator_of, choose_device

MOST_SETTLE_S = 0.5


def diagnose(
    loader: Iterable[Any] | Loader,
    step: Step,
    *,
    batches: int = 50,
    seconds: float = 60.0,
    device: torch.device | str | None = None,
    data: Dataset[Any] | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Find out what limits a training loop, and what other loaders would give; prints the result.

    Three measurements take turns: loading alone (T1), the step over one batch that is already on the device (T2), and
    both together (T). If the loader is a `DataLoader` over a map-style data set, every other loader of this project
    takes turns with them, and so do other numbers of workers if the step waits for data. Loaders that decode once do so
    for a part of the set, as much as the time allows.

    Args:
        loader: a `DataLoader`, a loader of `make_loader`, or any iterable of batches.
        step: trains on a batch: `step(batch)`, or `step(images, labels)` if it has several required arguments. It
            moves the batch to the device itself, as in the training loop.
        batches: how many batches each measurement times; fewer if `seconds` would not be enough.
        seconds: about how long it may take. A step that takes long exceeds it.
        device: whose clock is used: that of the step. By default that of `model`, or else the CUDA device if CUDA is
            in use.
        data: the map-style data set behind a loader that is no DataLoader.
        model, optimizer: their state is restored afterwards, as is that of the random generators in any case.

    Raises:
        DataError: the loader has no batches, or fewer than the measurements need and cannot begin again.
        ConfigError: a device that this machine does not have, or on which the model is not.
    """
    if batches < BLOCKS:
        raise ConfigError(f"batches={batches}: must be at least {BLOCKS}")
    place = _device_of(model, device)
    with ExitStack() as stack:
        stack.enter_context(_restored(loader, place, model, optimizer))
        diagnosis = _measure(loader, WatchedStep(calling(step)), batches, seconds, place, data, stack)
    if model is None or optimizer is None:
        missing = [name for name, value in (("model", model), ("optimizer", optimizer)) if value is None]
        given = " and ".join(f"{name}=" for name in missing)
        diagnosis.notes.append(f"the step has trained: give {given} to have what it changed restored")
    print(diagnosis)
    return diagnosis


def _measure(
    loader: Iterable[Any] | Loader,
    step: WatchedStep,
    batches: int,
    seconds: float,
    device: torch.device,
    data: Dataset[Any] | None,
    stack: ExitStack,
) -> Diagnosis:
    deadline = time.perf_counter() + seconds
    dataloader = loader if isinstance(loader, DataLoader) and _can_be_replaced(loader) else None
    # A copy, because persistent workers belong to the loop.
    stream = BatchStream(loader if dataloader is None else with_workers(dataloader, dataloader.num_workers))
    stack.callback(stream.close)
    first = next(stream.take(1), None)
    if not stream.taken:
        raise DataError("the loader has no batches")
    resident = map_tensors(accelerator_of(device).to_device, first)
    loaded, trained = stream.time_block(2, device), stream.time_block(2, device, step)
    if not loaded or not trained:
        raise DataError(_too_few(stream))
    if dataloader is None and data is not None:
        sizes = [len(leaf) for leaf in tree_leaves(first) if isinstance(leaf, Tensor) and leaf.dim()]
        dataloader = DataLoader(data, sizes[0] if sizes else 1, shuffle=True, generator=torch.Generator())
    others: list[Candidate] = []
    if dataloader is not None:
        others = candidates(dataloader, loaded[0], trained[1] / trained[0], seconds, device, stack)

    def settle_s(one: BatchStream) -> float:
        return min(one.buffered * loaded[0], MOST_SETTLE_S)

    loading = Timed(partial(stream.time_block, device=device), settle_s(stream))
    alone = Timed(partial(_time_resident, resident, device=device, step=step))
    both = Timed(partial(stream.time_block, device=device, step=step), settle_s(stream))
    turns = [loading, alone, both]
    for other in others:
        if not isinstance(loader, DataLoader):
            other.identical = "not compared"  # nothing is known of the order of its batches
        if other.stream:
            other.timed = Timed(partial(other.time_block, device=device, step=step), settle_s(other.stream))
            turns.append(other.timed)
    affordable = int(seconds / (BLOCKS * len(turns) * trained[0]))
    rounds = _take_turns(turns, min(max(affordable, 1), -(-batches // BLOCKS)), deadline)
    if not loading.blocks or not both.blocks:
        raise DataError(_too_few(stream))
    diagnosis = _diagnosis(stream, loading, alone, both, device, dataloader, others)
    if rounds < BLOCKS:
        diagnosis.notes.append(
            f"seconds={seconds:g} were over after {rounds} of {BLOCKS} rounds; the ranges are of these"
        )
    return diagnosis


def _take_turns(turns: list[Timed], size: int, deadline: float) -> int:
    """Time a block of `size` batches of each, in several rounds; each round begins with another.

    Returns:
        The number of rounds: fewer than `BLOCKS` if the time is over.
    """
    for number in range(BLOCKS):
        if number and time.perf_counter() > deadline:
            return number
        first = number % len(turns)
        for timed in tqdm(
            [*turns[first:], *turns[:first]], f"round {number + 1} of {BLOCKS}", leave=False, disable=None
        ):
            started, cpu_s = time.perf_counter(), _cpu_seconds()
            if block := timed.time_block(size):
                timed.blocks.append(block)
                timed.cores.append((_cpu_seconds() - cpu_s) / (time.perf_counter() - started))
            time.sleep(timed.settle_s)
    return BLOCKS


def _diagnosis(
    stream: BatchStream,
    loading: Timed,
    alone: Timed,
    both: Timed,
    device: torch.device,
    dataloader: DataLoader[Any] | None,
    others: list[Candidate],
) -> Diagnosis:
    loading_s, step_s, batch_s = (Figure.of([block for block, _ in timed.blocks]) for timed in (loading, alone, both))
    overlaps = [
        100 * min(max((t1 + t2 - t) / min(t1, t2), 0.0), 1.0)
        for (t1, _), (t2, _), (t, _) in zip(loading.blocks, alone.blocks, both.blocks, strict=False)
    ]
    can_tell = batch_s.high - batch_s.low < min(loading_s.median, step_s.median) / 2
    notes = []
    if stream.has_ended:
        notes.append(f"the loader ended after {stream.taken} batches and cannot begin again, so few were timed")
    if device.type == "cpu" and torch.cuda.is_initialized():
        notes.append("times are those of the CPU, but CUDA is in use: give device='cuda' if the step runs there")
    rows = [other.row(dataloader, loading_s.median) for other in others] if dataloader is not None else []
    return Diagnosis(
        loading_s,
        step_s,
        batch_s,
        waiting_s=Figure.of([waiting for _, waiting in both.blocks]),
        waiting_pct=Figure.of([100 * waiting / batch for batch, waiting in both.blocks]),
        overlap_pct=Figure.of(overlaps) if can_tell else None,
        first_batch_s=Figure.of(stream.first_batch_s),
        cores_busy=Figure.of(both.cores),
        device=str(device),
        batches_per_epoch=len(stream.source) if isinstance(stream.source, Sized) else None,
        alternatives=sorted(rows, key=lambda row: row.batch_s.median if row.batch_s else float("inf")),
        notes=notes,
    )


def _time_resident(
    batch: Any, size: int, device: torch.device, step: Callable[[Any], object]
) -> tuple[float, float] | None:
    seconds, waiting = time_batches(repeat(batch, size), device, step)
    return seconds / size, waiting / size


def _cpu_seconds() -> float:
    """Processor time of this process and its living children so far."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()  # in steps of 10 ms
            total += times.user + times.system
    return total


def _too_few(stream: BatchStream) -> str:
    return (
        f"the loader ended after {stream.taken} batches and cannot begin again, which is too few to time it; give a "
        "DataLoader or a list, or a generator of more batches"
    )


def _device_of(model: nn.Module | None, device: torch.device | str | None) -> torch.device:
    """The device whose clock is used.

    Raises:
        ConfigError: it is not there, or the model is on another one.
    """
    parameter = next(model.parameters(), None) if model is not None else None
    if device is None:
        if parameter is not None:
            return parameter.device
        return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    place = choose_device(str(device))
    if parameter is not None and parameter.device.type != place.type:
        raise ConfigError(f"device={device}: the model is on {parameter.device}; leave device out, or move the model")
    return place


def _can_be_replaced(dataloader: DataLoader[Any]) -> bool:
    """Whether others could deliver its batches: its samples have an index, and it iterates as torch does."""
    try:
        check_replaceable(dataloader)
    except UserError:
        return False
    return True


@contextmanager
def _restored(
    loader: Any, device: torch.device, model: nn.Module | None, optimizer: Optimizer | None
) -> Iterator[None]:
    """Restore the state of model, optimizer and random generators on exit."""
    modes = [(one, one.training) for one in model.modules()] if model is not None else []
    gradients = (
        [(one, one.grad if one.grad is None else one.grad.clone()) for one in model.parameters()]
        if model is not None
        else []
    )
    model_state = deepcopy(model.state_dict()) if model is not None else None
    optimizer_state = deepcopy(optimizer.state_dict()) if optimizer else None
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = {one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        with preserved_generators(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        if model is not None and model_state is not None:
            model.load_state_dict(model_state)
            for module, is_training in modes:
                module.training = is_training
            for parameter, gradient in gradients:
                parameter.grad = gradient
        if optimizer and optimizer_state:
            optimizer.load_state_dict(optimizer_state)
