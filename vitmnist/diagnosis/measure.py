"""Times a loader and a training step: alone, together, and with other loaders."""

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
from vitmnist.diagnosis.candidates import AS_IT_IS, add_alternatives
from vitmnist.errors import ConfigError, DataError
from vitmnist.replacement.original import rebuilt
from vitmnist.runtime.device import backend_of
from vitmnist.store.tree import map_tensors
from vitmnist.timing.benchmark import BLOCKS, Benchmark, Candidate, Step, as_one_argument_step, rows_of
from vitmnist.timing.table import Bottleneck, Figure, Row, format_few_steps, format_ms, format_rows

if TYPE_CHECKING:
    from vitmnist.loaders.base import Loader


@dataclass(frozen=True)
class Diagnosis:
    """What limits a training loop. Times are seconds per batch; each figure has its range over blocks of batches.

    Args:
        loading_s: T1, loading alone.
        step_s: T2, the step over one batch that is already on the device.
        batch_s: T, both together.
        waiting_pct: the part of T that the step waits for its batch.
        steps: how many were made while T was measured.
        rows: the loader as it is, and other ways to load the same batches.
        notes: what could not be measured, and why.
    """

    loading_s: Figure
    step_s: Figure
    batch_s: Figure
    waiting_pct: Figure
    steps: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bottleneck(self) -> Bottleneck:
        """Of T compared with the step alone, because workers may slow the step down without making it wait."""
        return Bottleneck.of(100 * (1 - self._best.median / self.batch_s.median), self.steps)

    @property
    def _best(self) -> Figure:
        """The least time of a batch: of the step alone, or of an alternative that is faster still."""
        times = [self.step_s, self.batch_s, *(row.batch_s for row in self.rows if row.batch_s)]
        return Figure(min(t.median for t in times), min(t.low for t in times), min(t.high for t in times))

    def __str__(self) -> str:
        times = {
            "loading alone (T1)": self.loading_s,
            "step alone (T2)": self.step_s,
            "both together (T)": self.batch_s,
        }
        lines = [f"{name:<20}{figure.text(format_ms)} a batch" for name, figure in times.items()]
        if self.bottleneck is Bottleneck.TOO_FEW_STEPS:
            lines.append(f"{format_few_steps(self.steps)}; give larger batches= or seconds=")
        else:
            # Of the ends of the ranges: with the medians, noise let a loader exceed the bound.
            most = self.batch_s.high / self._best.low
            waiting = f"waiting for data {self.waiting_pct.text('{:.0f}%'.format)}"
            lines.append(f"{self.bottleneck.value}: {waiting}; no loader can make the loop {most:.3g} times faster")
        return "\n".join([*lines, "", format_rows(self.rows), *(f"note: {note}" for note in self.notes)])


def diagnose(
    loader: Iterable[object] | Loader,
    step: Step,
    *,
    batches: int = 50,
    seconds: float = 60.0,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Find out what limits a training loop, and what other loaders would give; prints the result.

    Three measurements take turns: loading alone (T1), the step over one batch that is already on the device (T2), and
    both together (T). If the loader is a plain `DataLoader`, what `from_dataloader` makes of it takes turns with them,
    on as many samples as the time allows; and so do other numbers of workers if the step waits for data.

    Args:
        loader: a `DataLoader`, a loader of `make_loader`, or any iterable of batches.
        step: trains on a batch: `step(batch)`, or `step(images, labels)` if it has several required arguments. It
            moves the batch to the device itself, as in the training loop.
        batches: how many batches each measurement times; fewer if `seconds` would not be enough.
        seconds: about how long the measurements may take, once the loaders are built.
        model: its state is restored afterwards, as is that of the random generators in any case. Times are those of
            its device; without it, of the CUDA device if CUDA is in use, or else of the CPU.
        optimizer: its state is restored too.

    Raises:
        DataError: the loader has no batches, or is a generator, which cannot begin again.
    """
    if batches < BLOCKS:
        raise ConfigError(f"batches={batches}: must be at least {BLOCKS}")
    parameter = next(model.parameters(), None) if model is not None else None
    in_use = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    device = in_use if parameter is None else parameter.device
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_restored(model, optimizer))
        stack.enter_context(preserved_random_state(loader, device=device))
        warnings.simplefilter("ignore")  # such as torch's of more workers than cores
        diagnosis = _measure(loader, step, batches, seconds, device, stack)
    if missing := [f"{name}=" for name, value in (("model", model), ("optimizer", optimizer)) if value is None]:
        diagnosis.notes.append(f"the step has trained: give {' and '.join(missing)} to have what it changed restored")
    print(diagnosis)
    return diagnosis


def _measure(
    loader: Iterable[object] | Loader, step: Step, batches: int, seconds: float, device: torch.device, stack: ExitStack
) -> Diagnosis:
    plain = None
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        plain = rebuilt(loader)  # because persistent workers belong to the loop
    source = loader if plain is None else plain
    step = as_one_argument_step(step)
    loading = Candidate("", source, device, is_required=True)
    both = Candidate(AS_IT_IS, source, device, step, is_required=True)
    if isinstance(loader, Iterator):
        raise DataError("the loader is an iterator, which cannot begin again; give a DataLoader or a list")
    first = next(iter(loading.batches(0)), None)
    if first is None:
        raise DataError("the loader has no batches")
    resident = repeat(map_tensors(backend_of(device).to_device, first))
    alone = Candidate("", resident, device, step, is_required=True)
    benchmark = Benchmark(stack)
    benchmark.candidates += [loading, alone, both]
    for candidate in benchmark.candidates:
        candidate.time_block()
    if plain is not None:
        add_alternatives(benchmark, plain, both)
    rounds, notes = benchmark.run(batches, seconds), []
    if rounds < BLOCKS:
        notes.append(f"seconds={seconds:g} were over after {rounds} of {BLOCKS} rounds; the ranges are of these")
    loading_s, step_s, batch_s = (
        Figure.of(block.batch_s for block in candidate.blocks) for candidate in (loading, alone, both)
    )
    waiting_pct = Figure.of(100 * block.waiting_s / block.batch_s for block in both.blocks)
    rows = rows_of(benchmark.candidates[2:], both.length)
    return Diagnosis(loading_s, step_s, batch_s, waiting_pct, both.taken, rows, notes)


@contextmanager
def _restored(model: nn.Module | None, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the state of model and optimizer on exit."""
    states = [(part, deepcopy(part.state_dict())) for part in (model, optimizer) if part is not None]
    modules, parameters = (list(model.modules()), list(model.parameters())) if model is not None else ([], [])
    modes = [(module, module.training) for module in modules]
    gradients = [(parameter, None if parameter.grad is None else parameter.grad.clone()) for parameter in parameters]
    try:
        yield
    finally:
        for owner, state in states:
            owner.load_state_dict(state)
        for module, is_training in modes:
            module.training = is_training
        for parameter, gradient in gradients:
            parameter.grad = gradient
