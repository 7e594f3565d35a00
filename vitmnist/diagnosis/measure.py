"""`diagnose`: times a loader and a training step alone, together, and with other loaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitmnist.data.randomness import preserved_random_state
from vitmnist.diagnosis.candidates import BASELINE, add_alternatives
from vitmnist.errors import DataError
from vitmnist.replacement.original import rebuild
from vitmnist.runtime.device import create_backend
from vitmnist.store.tree import map_tensors
from vitmnist.timing.benchmark import Benchmark, LoaderCandidate, StepFunction, as_one_argument_step, make_rows
from vitmnist.timing.table import Bottleneck, Row, Spread, format_bottleneck, format_ms, format_rows

if TYPE_CHECKING:
    from vitmnist.loaders.base import Loader


@dataclass(frozen=True)
class Diagnosis:
    """What limits a training loop. Times are seconds per batch; each figure has its range over blocks of batches.

    Args:
        loading_s: T1, loading alone.
        step_s: T2, the step over one batch that is already on the device.
        batch_s: T, both together.
        waiting_pct: the percentage of T that the step waits for its batch.
        steps: how many steps were made while T was measured.
        rows: the loader as it is, and other ways to load the same batches.
    """

    loading_s: Spread
    step_s: Spread
    batch_s: Spread
    waiting_pct: Spread
    steps: int
    rows: list[Row] = field(default_factory=list)

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits the loop. T is compared with T2, because workers may slow the step down without a wait."""
        least_s = min(spread.median for spread in self._batch_times)
        return Bottleneck.of(100 * (1 - least_s / self.batch_s.median), self.steps)

    @property
    def _batch_times(self) -> list[Spread]:
        """The times of a batch with the step alone, and with each loader, which may be faster still."""
        return [self.step_s, self.batch_s, *(row.batch_s for row in self.rows if row.batch_s)]

    def __str__(self) -> str:
        lines = [
            f"loading alone (T1)  {self.loading_s.text(format_ms)} a batch",
            f"step alone (T2)     {self.step_s.text(format_ms)} a batch",
            f"both together (T)   {self.batch_s.text(format_ms)} a batch",
        ]
        if self.bottleneck is Bottleneck.TOO_FEW_STEPS:
            few_steps = format_bottleneck(self.bottleneck, self.waiting_pct.median, self.steps)
            lines.append(f"{few_steps}; give larger batches= or seconds=")
        else:
            # The bound is from the ends of the ranges: noise lets a loader exceed the quotient of the medians.
            most = self.batch_s.high / min(spread.low for spread in self._batch_times)
            waiting = f"waiting for data {self.waiting_pct.text('{:.0f}%'.format)}"
            lines.append(f"{self.bottleneck.value}: {waiting}; no loader can make the loop {most:.3g} times faster")
        return "\n".join([*lines, "", format_rows(self.rows)])


def diagnose(
    loader: Iterable[object] | Loader,
    step: StepFunction,
    *,
    batches: int = 50,
    seconds: float = 60.0,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Find out what limits a training loop, and what other loaders would give; prints the result.

    Three measurements take turns: loading alone (T1), the step over one batch that is already on the device (T2), and
    both together (T). For a plain `DataLoader`, so do its replacement by `from_dataloader`, for as many samples as the
    time allows, and other numbers of workers if the step waits for data.

    Args:
        loader: a `DataLoader`, a loader of `make_loader`, or any iterable of batches.
        step: trains on a batch: `step(batch)`, or `step(images, labels)` if it has several required arguments. It
            moves the batch to the device itself, as in the training loop.
        batches: how many batches each measurement times; fewer if `seconds` would not be enough.
        seconds: about how long the measurements may take, once the loaders are built.
        model: its state is restored afterwards, and its gradients are zeroed. Times are those of its device, or else of
            CUDA if it is in use.
        optimizer: its state is restored too. That of the random generators is in any case.

    Raises:
        DataError: the loader has no batches, or is a generator, which cannot begin again.
    """
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if model is not None:
        device = next((parameter.device for parameter in model.parameters()), device)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_restored(model, optimizer))
        stack.enter_context(preserved_random_state(loader, device=device))
        warnings.simplefilter("ignore")  # For example, torch warns of more workers than cores.
        benchmark = Benchmark(stack)
        loading, step_alone, together = _add_candidates(benchmark, loader, as_one_argument_step(step), device)
        benchmark.run(batches, seconds)
    diagnosis = Diagnosis(
        loading_s=Spread.of(block.batch_s for block in loading.blocks),
        step_s=Spread.of(block.batch_s for block in step_alone.blocks),
        batch_s=Spread.of(block.batch_s for block in together.blocks),
        waiting_pct=Spread.of(block.waiting_pct(None) for block in together.blocks),
        steps=together.num_batches,
        rows=make_rows([together, *benchmark.candidates[3:]], together.length),
    )
    print(diagnosis)
    if model is None or optimizer is None:
        print("note: the step has trained: give model= and optimizer= to have what it changed restored")
    return diagnosis


def _add_candidates(
    benchmark: Benchmark, loader: Iterable[object] | Loader, step: StepFunction, device: torch.device
) -> tuple[LoaderCandidate, LoaderCandidate, LoaderCandidate]:
    """Add loading alone, the step alone, both together, and the alternatives; returns the first three."""
    if isinstance(loader, Iterator):
        raise DataError("the loader is an iterator, which cannot begin again; give a DataLoader or a list")
    plain = None
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        loader = plain = rebuild(loader)  # Persistent workers of the original belong to the training loop.
    loading = LoaderCandidate(loader, device, is_required=True)
    first_batch = next(iter(loading.batches(0)), None)
    if first_batch is None:
        raise DataError("the loader has no batches")
    resident_batch = map_tensors(create_backend(device).to_device, first_batch)
    step_alone = LoaderCandidate(repeat(resident_batch), device, step, is_required=True)
    together = LoaderCandidate(loader, device, step, is_required=True, name=BASELINE)
    for candidate in (loading, step_alone, together):
        benchmark.candidates.append(candidate)
        candidate.time_block()
    if plain is not None:
        add_alternatives(benchmark, plain, together)
    return loading, step_alone, together


@contextmanager
def _restored(model: nn.Module | None, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the state of model and optimizer on exit, and zero the gradients."""
    owners = [owner for owner in (model, optimizer) if owner is not None]
    states = [deepcopy(owner.state_dict()) for owner in owners]
    modules = list(model.modules()) if model is not None else []
    modes = [module.training for module in modules]
    # A state_dict lacks the buffers that are not persistent.
    owned = [(module, *named) for module in modules for named in module.named_buffers(recurse=False)]
    buffers = [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in owned]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, name, buffer, saved in buffers:
            with torch.no_grad():
                setattr(module, name, buffer.copy_(saved))
        for owner, state in zip(owners, states, strict=True):
            owner.load_state_dict(state)
            owner.zero_grad()
