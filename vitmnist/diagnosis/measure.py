"""Times a loader and a training step: alone, together, and with other loaders."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from itertools import count, repeat
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitmnist.data.collate import map_tensors
from vitmnist.data.seeding import preserved_generators
from vitmnist.diagnosis.alternatives import Alternatives, complete_row
from vitmnist.diagnosis.result import Diagnosis
from vitmnist.errors import ConfigError, DataError, UserError
from vitmnist.loaders.base import Loader
from vitmnist.loaders.batch_stream import BatchStream
from vitmnist.loaders.timing import BLOCKS, Alternative, Figure, Step, Timed, calling, take_turns, try_workers
from vitmnist.replacement.original import check_replaceable, rebuilt
from vitmnist.runtime.device import backend_of, choose_device


def diagnose(
    loader: Iterable[Any] | Loader,
    step: Step,
    *,
    batches: int = 50,
    seconds: float = 60.0,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Find out what limits a training loop, and what other loaders would give; prints the result.

    Three measurements take turns: loading alone (T1), the step over one batch that is already on the device (T2), and
    both together (T). If the loader is a `DataLoader` over a map-style dataset, what `from_dataloader` makes of it
    takes turns with them, with as many samples as the time allows; and so do other numbers of workers if the step waits
    for data.

    Args:
        loader: a `DataLoader`, a loader of `make_loader`, or any iterable of batches.
        step: trains on a batch: `step(batch)`, or `step(images, labels)` if it has several required arguments. It
            moves the batch to the device itself, as in the training loop.
        batches: how many batches each measurement times; fewer if `seconds` would not be enough.
        seconds: about how long it may take. What there is no time for is left out, and named.
        device: that of the step, whose clock is used. By default that of `model`, or else the CUDA device if CUDA is
            in use.
        model: its state is restored afterwards, as is that of the random generators in any case.
        optimizer: the same.

    Raises:
        DataError: the loader has no batches, or fewer than the measurements need and cannot begin again.
        ConfigError: a device that this machine does not have, or on which the model is not.
    """
    if batches < BLOCKS:
        raise ConfigError(f"batches={batches}: must be at least {BLOCKS}")
    run_device = _device_of(model, device)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch warns of more workers than cores, but samples that wait for a disk gain from them.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", "transforms='tensor'")  # the table says so
        stack.enter_context(_restored(loader, run_device, model, optimizer))
        diagnosis = _measure(loader, calling(step), batches, seconds, run_device, stack)
    if model is None or optimizer is None:
        missing = [name for name, value in (("model", model), ("optimizer", optimizer)) if value is None]
        given = " and ".join(f"{name}=" for name in missing)
        diagnosis.notes.append(f"the step has trained: give {given} to have what it changed restored")
    print(diagnosis)
    return diagnosis


def _measure(
    loader: Iterable[Any] | Loader,
    step: Callable[[Any], object],
    batches: int,
    seconds: float,
    device: torch.device,
    stack: ExitStack,
) -> Diagnosis:
    deadline = time.perf_counter() + seconds
    dataloader: Any = None
    with suppress(UserError):  # no other loader can deliver its batches
        check_replaceable(loader)
        dataloader = loader
    # A copy, because persistent workers belong to the loop.
    stream = BatchStream(loader if dataloader is None else rebuilt(dataloader), device)
    stack.callback(stream.close)
    first = next(stream.take(1), None)
    if not stream.taken:
        raise DataError("the loader has no batches")
    resident = repeat(map_tensors(backend_of(device).to_device, first))
    steps = count()
    turns = [
        Timed(stream),
        Timed(BatchStream(resident, device), step),
        Timed(stream, lambda batch: (next(steps), step(batch))),
    ]
    loading, _, both = turns
    warm_up = [timed.time_block() for timed in turns]
    rows: list[Alternative] = []
    if all(warm_up) and dataloader is not None:
        others = Alternatives(stack, dataloader=dataloader, step=step, device=device, seconds=seconds)
        try_workers(both, dataloader.num_workers, others.add_workers)
        others.add_decoded(warm_up[0].batch_s)  # type: ignore[union-attr]
        turns += others.turns
        rows = others.rows
    rounds = take_turns(turns, batches, deadline - time.perf_counter())
    if not loading.blocks or not both.blocks:
        raise DataError(
            f"the loader ended after {stream.taken} batches and cannot begin again, which is too few to time it; "
            "give a DataLoader or a list, or a generator of more batches"
        )
    for timed in turns[3:]:
        complete_row(timed, stream.length)
    diagnosis = _diagnosis(turns, next(steps), rows)
    if rounds < BLOCKS:
        ended = f"seconds={seconds:g} were over after {rounds} of {BLOCKS} rounds"
        diagnosis.notes.append(f"{ended}; the ranges are of these")
    return diagnosis


def _diagnosis(turns: list[Timed], steps: int, rows: list[Alternative]) -> Diagnosis:
    """The diagnosis; the first three of `turns` are loading alone, the step alone, and both."""
    times = [[block.batch_s for block in timed.blocks] for timed in turns[:3]]
    stream, blocks = turns[2].stream, turns[2].blocks
    loading_s, step_s, batch_s = map(Figure.of, times)
    notes = []
    if stream.has_ended:
        notes.append(f"the loader ended after {stream.taken} batches and cannot begin again, so few were timed")
    if stream.device.type == "cpu" and torch.cuda.is_initialized():
        notes.append("times are those of the CPU, but CUDA is in use: give device='cuda' if the step runs there")
    return Diagnosis(
        loading_s,
        step_s,
        batch_s,
        waiting_s=Figure.of(block.waiting_s for block in blocks),
        waiting_pct=Figure.of(100 * block.waiting_s / block.batch_s for block in blocks),
        first_batch_s=Figure.of(stream.first_batch_s),
        cores_busy=Figure.of(block.cores for block in blocks),
        steps=steps,
        rounds=len(turns[2].blocks),
        device=str(stream.device),
        alternatives=sorted(rows, key=lambda row: row.batch_s.median if row.batch_s else float("inf")),
        notes=notes,
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
    run_device = choose_device(str(device))
    if parameter is not None and parameter.device.type != run_device.type:
        raise ConfigError(f"device={device}: the model is on {parameter.device}; leave device out, or move the model")
    return run_device


@contextmanager
def _restored(
    loader: Any, device: torch.device, model: nn.Module | None, optimizer: Optimizer | None
) -> Iterator[None]:
    """Restore the state of model, optimizer and random generators on exit."""
    states: list[tuple[Any, Any]] = [(one, deepcopy(one.state_dict())) for one in (model, optimizer) if one is not None]
    modes = [(module, module.training) for module in (model.modules() if model is not None else ())]
    gradients = [
        (parameter, None if parameter.grad is None else parameter.grad.clone())
        for parameter in (model.parameters() if model is not None else ())
    ]
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = {one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators]
    try:
        with preserved_generators(device):
            yield
    finally:
        for generator, generator_state in drawn:
            generator.set_state(generator_state)
        for owner, state in states:
            owner.load_state_dict(state)
        for module, is_training in modes:
            module.training = is_training
        for parameter, gradient in gradients:
            parameter.grad = gradient
