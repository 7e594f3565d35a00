"""`diagnose` times a loader and a training step alone, together, and with other loaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitmnist.diagnosis.candidates import BASELINE, add_alternatives
from vitmnist.errors import DataError
from vitmnist.replacement.original_dataloader import rebuild
from vitmnist.runtime.buffers import preserve_buffers
from vitmnist.runtime.device import create_queue, refuse_mps
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.tree import map_batch_tensors
from vitmnist.timing.benchmark import Benchmark, LoaderCandidate, StepFunction, make_timings
from vitmnist.timing.table import Bottleneck, LoaderTiming, Spread, format_bottleneck, format_timings

if TYPE_CHECKING:
    from vitmnist.loaders.base import Loader

LAUNCH_ADVICE = "Python is no step ahead of the GPU: larger batches help, or a step without .item(), .cpu() and print"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. Times are in seconds per batch, each with its range over windows of batches.

    Args:
        loading_s: T1, loading alone.
        step_s: T2, the step on a batch that is already on the device.
        batch_s: T, both together.
        waiting_pct: percentage of T in which the step waits for its batch.
        steps: number of steps in the measurement of T.
        host_lead: number of steps that were queued on the GPU at the end of a window (median); None on the CPU.
        timings: the loader in use, and other ways to load the same batches.
    """

    loading_s: Spread
    step_s: Spread
    batch_s: Spread
    waiting_pct: Spread
    steps: int
    host_lead: float | None = None
    timings: list[LoaderTiming] = field(default_factory=list)

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits the loop."""
        return Bottleneck.of(self.waiting_pct.median, self.steps, self.host_lead)

    def __str__(self) -> str:
        lines = [
            f"loading alone (T1)  {self.loading_s.format_times()} a batch",
            f"step alone (T2)     {self.step_s.format_times()} a batch",
            f"both together (T)   {self.batch_s.format_times()} a batch",
            format_bottleneck(self.bottleneck, self.waiting_pct.median, self.steps),
            *([LAUNCH_ADVICE] if self.bottleneck is Bottleneck.LAUNCH else []),
            "",
            format_timings(self.timings),
        ]
        return "\n".join(lines)


def diagnose(
    loader: Iterable[object] | Loader,
    step: StepFunction,
    *,
    batches: int = 50,
    seconds: float = 60.0,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Measure and print what limits a training loop, and how fast it is with other loaders.

    Three measurements take turns: loading alone (T1), the step on a batch that is already on the device (T2), and both
    together (T). A plain `DataLoader` is also compared with its replacement by `from_dataloader`, for as many samples
    as time allows. If the step waits for data, it is also compared with other values of `num_workers`. The states of
    random generators are restored afterwards.

    Args:
        loader: a `DataLoader`, a loader of `make_loader`, or any iterable of batches.
        step: called as `step(batch)` to train on a batch. It moves the batch to the device itself.
        batches: number of batches of each measurement; fewer if they would exceed `seconds`.
        seconds: approximate time limit for all measurements, without the set-up of the loaders.
        model: its state is restored afterwards, and its gradients are zeroed. Its device is timed. Without a model,
            CUDA is timed if it is in use.
        optimizer: its state is restored afterwards.

    Raises:
        ConfigError: the model is on a device of type mps.
        DataError: the loader has no batches, or is an iterator, which cannot be restarted.
    """
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if model is not None:
        device = next((parameter.device for parameter in model.parameters()), device)
    refuse_mps(device.type)
    with (
        warnings.catch_warnings(),
        _preserve_state(model, optimizer),
        preserve_random_state(loader, device=device),
    ):
        warnings.simplefilter("ignore")  # For example, torch warns if there are more workers than cores.
        benchmark = Benchmark()
        _add_candidates(benchmark, loader, step, device)
        benchmark.run(batches, seconds)
    loading, step_alone, together, *alternatives = benchmark.measurements
    leads = [window.host_lead for window in together.windows if window.host_lead is not None]
    diagnosis = Diagnosis(
        loading_s=Spread.of(window.later_batch_s for window in loading.windows),
        step_s=Spread.of(window.later_batch_s for window in step_alone.windows),
        batch_s=Spread.of(window.later_batch_s for window in together.windows),
        waiting_pct=Spread.of(100 * window.later_waiting_s / window.later_batch_s for window in together.windows),
        steps=sum(window.batches for window in together.windows),
        host_lead=median(leads) if leads else None,
        timings=make_timings([together, *alternatives], together.candidate.length),
    )
    print(diagnosis)
    if model is None or optimizer is None:
        print("note: the step has trained; with model= and optimizer=, their states are restored")
    return diagnosis


def _add_candidates(
    benchmark: Benchmark, loader: Iterable[object] | Loader, step: StepFunction, device: torch.device
) -> None:
    """Add loading alone, the step alone, both together, and the alternatives, in this order."""
    if isinstance(loader, Iterator):
        raise DataError("the loader is an iterator, which cannot begin again; give a DataLoader or a list")
    plain = None
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        loader = plain = rebuild(loader)  # The persistent workers of the original belong to the training loop.
    loading = LoaderCandidate(loader, device)
    first_batch = next(iter(loading.batches(0)), None)
    if first_batch is None:
        raise DataError("the loader has no batches")
    device_batch = map_batch_tensors(create_queue(device).to_device, first_batch)
    benchmark.add("loading", lambda: loading, is_required=True)
    benchmark.add("step", lambda: LoaderCandidate(repeat(device_batch), device, step), is_required=True)
    baseline = benchmark.add(BASELINE, lambda: LoaderCandidate(loader, device, step), is_required=True)
    if plain is not None:
        add_alternatives(benchmark, plain, baseline)


@contextmanager
def _preserve_state(model: nn.Module | None, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the states of the model and the optimizer on exit, and zero the gradients."""
    states = [(owner, deepcopy(owner.state_dict())) for owner in (model, optimizer) if owner is not None]
    modes = [(module, module.training) for module in (model.modules() if model is not None else ())]
    try:
        with preserve_buffers(model) if model is not None else nullcontext():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for owner, state in states:
            owner.load_state_dict(state)
            owner.zero_grad()
