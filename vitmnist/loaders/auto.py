"""`auto` times a few batches with each loader that fits, and builds the fastest.

All loaders deliver the same batches, so the choice affects nothing but the time.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitmnist.config.validation import config_field
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.errors import ConfigError, suggest_names
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.timing.benchmark import Benchmark, LoaderCandidate, StepFunction, make_timings
from vitmnist.timing.table import LoaderTiming, format_timings


@dataclass
class AutoOptions:
    """See `conf/data/loader/auto.yaml`."""

    batches: int = config_field(30, at_least=1)
    seconds: float = config_field(3.0, above=0)
    candidates: list[str] | None = None
    folder: str = DEFAULT_FOLDER

    def candidate_config(self, name: str) -> dict[str, Any]:
        """Return the name of a candidate and its options: the defaults, but the folder of `auto`."""
        values = LOADERS.with_defaults({"name": name})
        return {**values, "folder": self.folder} if "folder" in values else values


@dataclass(frozen=True)
class LoaderSelection:
    """The selected loader, the reason, and the timings of all candidates."""

    name: str
    reason: str
    candidates: list[LoaderTiming]

    def format_table(self) -> str:
        return f"{format_timings(self.candidates)}\nchosen: {self.name}, {self.reason}"


def build_fastest_loader(
    options: AutoOptions,
    source: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    step: StepFunction | None = None,
) -> Loader:
    """Build the loader with the fastest epoch, and print the table to stderr.

    The function `step` trains on a batch; without it, batches are dropped. Raises the errors of `select_loader`.
    """
    make_candidate = partial(LoaderCandidate, device=device, step=step)
    # The number of timed batches depends on the time, so their random numbers must not affect the run.
    with preserve_random_state(device=device):
        selection, loader = select_loader(options, source, sampler, device, make_candidate)
    print(selection.format_table(), file=sys.stderr)
    return loader


LOADERS.register("auto", AutoOptions)(build_fastest_loader)  # As a decorator, it would hide `step` from type checkers.


def select_loader(
    options: AutoOptions,
    source: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    make_candidate: Callable[[Loader], LoaderCandidate],
) -> tuple[LoaderSelection, Loader]:
    """Time the loaders that fit, and return the fastest. The caller must close it.

    Args:
        make_candidate: makes a loader a candidate, with or without a training step.

    Raises:
        ConfigError: a candidate is unknown, or none can be used.
    """
    decoded: SampleSource | None = None  # Loaders that take decoded samples share them: memory stores them once.
    loaders: dict[str, Loader] = {}
    benchmark = Benchmark()

    def build(name: str, candidate_source: SampleSource) -> LoaderCandidate:
        started = time.perf_counter()
        loader = LOADERS.build(options.candidate_config(name), candidate_source, sampler, device)
        setup_s = time.perf_counter() - started
        return replace(make_candidate(loader), setup_s=setup_s)

    with ExitStack() as stack:
        for name in _loaders_to_try(options):
            if name == "cache" and decoded is not None and not options.candidates:
                continue  # The samples fit into memory, so a file is not written.
            takes_decoded = getattr(LOADERS.members()[name].function, "takes_decoded", False)
            candidate_source = decoded if decoded is not None and takes_decoded else source
            loader = benchmark.add(name, partial(build, name, candidate_source)).candidate.loader
            if isinstance(loader, Loader):
                loaders[name] = stack.enter_context(loader)
                decoded = loader.decoded if decoded is None else decoded
        benchmark.run(options.batches, options.seconds * len(benchmark.measurements))
        timings = make_timings(benchmark.measurements, len(sampler))
        epochs_s = {timing.name: timing.epoch_s for timing in timings if timing.epoch_s}
        if not epochs_s:
            names_by_error: dict[str | None, list[str]] = {}  # If `step` fails, all loaders have the same error.
            for timing in timings:
                names_by_error.setdefault(timing.error, []).append(timing.name)
            errors = [f"{', '.join(names)}: {error}" for error, names in names_by_error.items()]
            raise ConfigError("\n".join(["no candidate can be used:", *errors]))
        fastest = min(epochs_s, key=lambda name: epochs_s[name].median)
        stack.pop_all()  # The selected loader stays open.
    selected = loaders.pop(fastest)
    for other in loaders.values():
        other.close()
    reason = f"{epochs_s[fastest].median:.3g} s an epoch expected, the least"
    return LoaderSelection(fastest, reason, timings), selected


def _loaders_to_try(options: AutoOptions) -> list[str]:
    """Return the names of the loaders to try, `ram` first and `cache` last."""
    names = [name for name in LOADERS.members() if name != "auto"]
    for name in options.candidates or ():
        if name not in names:
            raise ConfigError(f"data.loader.candidates={name}: not known; {suggest_names(name, names)}")
    return sorted(options.candidates or names, key=lambda name: (name != "ram", name == "cache"))
