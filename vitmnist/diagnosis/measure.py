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
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitmnist.data.randomness import preserved_random_state
from vitmnist.diagnosis.candidates import AS_IT_IS, add_alternatives
from vitmnist.errors import DataError
from vitmnist.replacement.original import rebuild
from vitmnist.runtime.device import backend_of
from vitmnist.store.tree import map_tensors
from vitmnist.timing.benchmark import Benchmark, Candidate, Step, as_one_argument_step, rows_of
from vitmnist.timing.table import Bottleneck, Row, Spread, format_few_steps, format_ms, format_rows

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
        return Bottleneck.of(100 * (1 - self._best.median / self.batch_s.median), self.steps)

    @property
    def _best(self) -> Spread:
        """The least time of a batch: with the step alone, or with an alternative that is faster still."""
        times = [self.step_s, self.batch_s, *(row.batch_s for row in self.rows if row.batch_s)]
        median, low, high = (min(getattr(time, bound) for time in times) for bound in ("median", "low", "high"))
        return Spread(median, low, high, self.step_s.n)

    def __str__(self) -> str:
        times = {
            "loading alone (T1)": self.loading_s,
            "step alone (T2)": self.step_s,
            "both together (T)": self.batch_s,
        }
        lines = [f"{name:<20}{spread.text(format_ms)} a batch" for name, spread in times.items()]
        if self.bottleneck is Bottleneck.TOO_FEW_STEPS:
            lines.append(f"{format_few_steps(self.steps)}; give larger batches= or seconds=")
        else:
            # The bound is from the ends of the ranges: noise lets a loader exceed the quotient of the medians.
            most = self.batch_s.high / self._best.low
            waiting = f"waiting for data {self.waiting_pct.text('{:.0f}%'.format)}"
            lines.append(f"{self.bottleneck.value}: {waiting}; no loader can make the loop {most:.3g} times faster")
        return "\n".join([*lines, "", format_rows(self.rows)])


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
        model: its state is restored afterwards, and its gradients are zeroed. Times are those of its device; without
            it, those of the CUDA device if CUDA is in use, or else of the CPU.
        optimizer: its state is restored too. That of the random generators is in any case.

    Raises:
        DataError: the loader has no batches, or is a generator, which cannot begin again.
    """
    parameter = next(model.parameters(), None) if model is not None else None
    in_use = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    device = in_use if parameter is None else parameter.device
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_restored(model, optimizer))
        stack.enter_context(preserved_random_state(loader, device=device))
        warnings.simplefilter("ignore")  # For example, torch warns of more workers than cores.
        diagnosis = _measure(loader, step, batches, seconds, device, stack)
    print(diagnosis)
    if model is None or optimizer is None:
        print("note: the step has trained: give model= and optimizer= to have what it changed restored")
    return diagnosis


def _measure(
    loader: Iterable[object] | Loader, step: Step, batches: int, seconds: float, device: torch.device, stack: ExitStack
) -> Diagnosis:
    plain = None
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        loader = plain = rebuild(loader)  # Persistent workers of the original belong to the loop.
    step = as_one_argument_step(step)
    loading = Candidate(loader, device, is_required=True)
    both = Candidate(loader, device, step, is_required=True, name=AS_IT_IS)
    if isinstance(loader, Iterator):
        raise DataError("the loader is an iterator, which cannot begin again; give a DataLoader or a list")
    first = next(iter(loading.batches(0)), None)
    if first is None:
        raise DataError("the loader has no batches")
    resident = repeat(map_tensors(backend_of(device).to_device, first))
    alone = Candidate(resident, device, step, is_required=True)
    benchmark = Benchmark(stack)
    benchmark.candidates += [loading, alone, both]
    for candidate in benchmark.candidates:
        candidate.time_block()
    if plain is not None:
        add_alternatives(benchmark, plain, both)
    benchmark.run(batches, seconds)
    loading_s, step_s, batch_s = (
        Spread.of(block.batch_s for block in candidate.blocks) for candidate in (loading, alone, both)
    )
    waiting_pct = Spread.of(100 * block.waiting_s / block.batch_s for block in both.blocks)
    rows = rows_of(benchmark.candidates[2:], both.length)
    return Diagnosis(loading_s, step_s, batch_s, waiting_pct, both.num_batches, rows)


@contextmanager
def _restored(model: nn.Module | None, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the state of model and optimizer on exit, and zero the gradients."""
    owners = [owner for owner in (model, optimizer) if owner is not None]
    states = [deepcopy(owner.state_dict()) for owner in owners]
    try:
        with ExitStack() as stack:
            for module in model.modules() if model is not None else ():
                stack.enter_context(_restored_module(module))
            yield
    finally:
        for owner, state in zip(owners, states, strict=True):
            owner.load_state_dict(state)
            owner.zero_grad()


@contextmanager
def _restored_module(module: nn.Module) -> Iterator[None]:
    """Restore the training mode of a module and its own buffers on exit.

    A `state_dict` lacks the buffers that are not persistent, and those that were None when it was taken.
    """
    is_training = module.training
    buffers = _own_buffers(module)
    values = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        module.training = is_training
        for name in _own_buffers(module).keys() - buffers.keys():
            setattr(module, name, None)
        for name, buffer in buffers.items():
            with torch.no_grad():
                setattr(module, name, buffer.copy_(values[name]))


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module without those of its submodules."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))
