"""`auto` times a few batches with each loader that fits, and builds the fastest.

All loaders deliver the same batches, so the choice affects nothing but the time.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vitmnist.config.validation import config_field
from vitmnist.data.randomness import preserved_random_state
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.errors import ConfigError, suggest_names
from vitmnist.loaders.base import LOADERS, Loader, check_memory, get_placement
from vitmnist.store.cache_file import DEFAULT_FOLDER
from vitmnist.store.rows import Placement
from vitmnist.timing.benchmark import Benchmark, LoaderCandidate, StepFunction, make_timings
from vitmnist.timing.table import LoaderTiming, format_timings


@dataclass
class AutoOptions:
    """See `conf/data/loader/auto.yaml`."""

    batches: int = config_field(30, at_least=1)
    seconds: float = config_field(3.0, above=0)
    candidates: list[str] | None = None
    folder: str = DEFAULT_FOLDER

    def candidate_values(self, name: str) -> dict[str, Any]:
        """Return the name of a candidate and its options: the defaults, but the folder of `auto`."""
        values = LOADERS.with_defaults({"name": name})
        return {**values, "folder": self.folder} if "folder" in values else values


@dataclass(frozen=True)
class LoaderSelection:
    """The selected loader, the reason, and the timings of all candidates."""

    name: str
    reason: str
    candidates: list[LoaderTiming]

    def table(self) -> str:
        return f"{format_timings(self.candidates)}\nchosen: {self.name}, {self.reason}"


@LOADERS.register("auto", AutoOptions)
def build_fastest_loader(
    options: AutoOptions,
    data: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    step: StepFunction | None = None,
) -> Loader:
    """Build the loader with the fastest epoch, and print the table to stderr.

    `step` trains on a batch; without it, batches are dropped. Raises the errors of `select_loader`.
    """
    make_candidate = partial(LoaderCandidate, device=device, step=step) if step else None
    # The number of steps depends on the time, so their random numbers must not affect the run.
    with preserved_random_state(device=device):
        selection, loader = select_loader(options, data, sampler, device, make_candidate=make_candidate)
    print(selection.table(), file=sys.stderr)
    return loader


def select_loader(
    options: AutoOptions,
    data: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    *,
    make_candidate: Callable[[Loader], LoaderCandidate] | None = None,
) -> tuple[LoaderSelection, Loader]:
    """Time the loaders that fit, and return the fastest. The caller must close it.

    Args:
        make_candidate: makes a loader a candidate with a training step; without it, batches are dropped.

    Raises:
        ConfigError: a candidate is unknown, or none can be used.
    """
    host_samples: SampleSource | None = None
    with Benchmark() as benchmark:
        for name, placement in _loaders_to_try(options, data).items():
            # If memory already holds the samples, a file is not needed.
            if options.candidates or placement is not Placement.FILE or host_samples is None:
                in_memory = placement in (Placement.HOST, Placement.DEVICE)
                source = host_samples if host_samples and in_memory else data
                values = options.candidate_values(name)
                build = partial(_build_candidate, values, source, sampler, device, placement, make_candidate)
                candidate = benchmark.add(name, build)
                host_samples = host_samples or getattr(candidate.loader, "host_samples", None)
        benchmark.run(options.batches, options.seconds * len(benchmark.candidates))
        timings = make_timings(benchmark.candidates, len(sampler), has_baseline=False)
        epochs_s = {timing.name: timing.epoch_s for timing in timings if timing.epoch_s}
        if not epochs_s:
            names_by_error: dict[str | None, list[str]] = {}  # If the step fails, all loaders have the same error.
            for timing in timings:
                names_by_error.setdefault(timing.error, []).append(timing.name)
            errors = [f"{', '.join(names)}: {error}" for error, names in names_by_error.items()]
            raise ConfigError("\n".join(["no candidate can be used:", *errors]))
        name = min(epochs_s, key=lambda name: epochs_s[name].median)
        benchmark.pop_all()  # The selected loader stays open.
    candidates = benchmark.candidates
    loaders = {candidate.name: candidate.loader for candidate in candidates if isinstance(candidate.loader, Loader)}
    selected = loaders.pop(name)
    for other in loaders.values():
        other.close()
    reason = f"{epochs_s[name].median:.3g} s an epoch expected, the least"
    return LoaderSelection(name, reason, timings), selected


def _build_candidate(
    values: Mapping[str, Any],
    data: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    placement: Placement,
    make_candidate: Callable[[Loader], LoaderCandidate] | None,
) -> LoaderCandidate:
    """Build a loader; raises `OutOfSpaceError` if it does not fit next to the loaders before it."""
    check_memory(values["name"], placement, data, device)
    started = time.perf_counter()
    loader = LOADERS.build(values, data, sampler, device)
    set_up_s = time.perf_counter() - started
    candidate = make_candidate(loader) if make_candidate else LoaderCandidate(loader, device)
    candidate.set_up_s = set_up_s
    return candidate


def _loaders_to_try(options: AutoOptions, data: SampleSource) -> dict[str, Placement]:
    """Return the loaders to try, in order: their names, and where they keep samples."""
    placements = {name: placement for name in LOADERS.names() if (placement := get_placement(name, data))}
    for name in options.candidates or ():
        if name not in placements:
            problem = "its options do not say what it keeps (`placement`)" if name in LOADERS.names() else "not known"
            raise ConfigError(f"data.loader.candidates={name}: {problem}; {suggest_names(name, list(placements))}")
    # Loaders in host memory come first, because others reuse what they decode. Loaders of files come last, because
    # they are often not needed by then.
    order = (Placement.HOST, Placement.DEVICE, Placement.ON_DEMAND, Placement.FILE)
    names = sorted(options.candidates or placements, key=lambda name: order.index(placements[name]))
    return {name: placements[name] for name in names}
