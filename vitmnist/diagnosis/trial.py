"""Reads some samples of a script's loader after its end: what workers and decoding once cost, what takes the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.data.randomness import PROBES
from vitmnist.diagnosis.alternatives import decode_part
from vitmnist.diagnosis.epochs import Loop
from vitmnist.diagnosis.observation import Source
from vitmnist.errors import ConfigError
from vitmnist.loaders.timing import reason
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.original import COMPARED, COMPARED_SIZE, check_iteration, check_replaceable
from vitmnist.replacement.split_transforms import apply, flatten, transform_attributes
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import DoesNotFitError
from vitmnist.store.read_once import reading_workers, unchanged

ASKED = 16  # samples that are read; fewer of slow ones
READING_S = 0.3  # for reading each of them once
GATHERS = "decodes once"
DIVIDES = "decodes what is not random once"
KEEPS = "decodes once and collates each time"


@dataclass
class Trial:
    """What was measured; times in seconds.

    Args:
        unread: why no sample can be read after the script's end, such as that of a thread pool that it has closed.
        set_up_s: to make the replacement, at least and at most.
        method: what the replacement does.
        replaced: the replacement for a part of the samples.
    """

    refused: str | None = None
    unread: str | None = None
    set_up_s: tuple[float, float] = (0.0, 0.0)
    memory_bytes: int = 0
    method: str = ""
    replaced: Any = None
    parts: dict[str, float] = field(default_factory=dict)


def try_samples(source: Source, figures: dict[str, Any], loop: Loop) -> Trial:
    """Try `from_dataloader` with a few samples of a loader, unless they are decoded already."""
    trial, kind = Trial(), source.kind
    if isinstance(source.dataset, DecodedDataset):
        return trial
    try:
        if not issubclass(kind, DataLoader):
            raise ConfigError(f"{kind.__module__}.{kind.__name__} is no torch.utils.data.DataLoader")
        check_iteration(kind)
        # Spawned workers would import the script again; its own restarts say how long that takes.
        workers = figures["num_workers"] if figures["start_method"] == "fork" else 0
        loader = DataLoader(
            source.dataset,
            **source.batches,
            collate_fn=source.collate,
            num_workers=workers,
            persistent_workers=figures["persistent_workers"] and workers > 0,
        )
        check_replaceable(loader)
        _try(loader, trial, loop)
        if workers < figures["num_workers"] and not trial.unread:
            _add_spawned(trial, figures)
    except DoesNotFitError:  # in memory; a file may have room
        trial.refused = None
    except Exception as error:  # samples and collate function may fail in any way
        # Where `decode_part` keeps samples.
        trial.refused = reason(error, "dataloader").removeprefix("ram: ")
    return trial


def _try(loader: DataLoader[Any], trial: Trial, loop: Loop) -> None:
    dataset: Any = loader.dataset
    size, started = len(dataset), perf_counter()
    try:
        dataset[0]
    except Exception as error:  # the script has read samples
        trial.unread = reason(error)
        return
    asked = min(ASKED, size, max(2, int(READING_S / (perf_counter() - started))))
    indices = range(0, size, max(size // asked, 1))[:asked]
    trial.parts = time_parts(dataset, loader.collate_fn, indices)
    read_s = sum(trial.parts.values())
    started = perf_counter()
    trial.replaced, trial.memory_bytes = decode_part(loader, indices)
    set_up_s = perf_counter() - started
    transform = vars(trial.replaced.dataset).get("_transform")
    is_gathered, keeps_all = transform is None, transform is unchanged
    trial.method = GATHERS if is_gathered else KEEPS if keeps_all else DIVIDES
    again = 2 if is_gathered else 1  # how often the probes are read
    compared = COMPARED * min(loop.batch_size, COMPARED_SIZE)

    def checked_s(count: int) -> float:
        """For the samples that are read again, alone and in batches, before the replacement is returned."""
        return (again * min(PROBES, count) + min(compared, count)) * read_s

    workers = reading_workers(loader.dataset, loader.num_workers)
    # Per sample, in chunks as they are handed over.
    others = replace(loop, batches=1 / PROBES, batch_size=PROBES, work_s=0.0).epoch(dataset, unchanged, workers)
    each_s = others.rest_s if others else read_s
    seconds = set_up_s + checked_s(size) - checked_s(asked) + (size - asked) * each_s
    trial.set_up_s = seconds, seconds


def _add_spawned(trial: Trial, figures: dict[str, Any]) -> None:
    """Add the start of workers by another method than fork; they may read as fast as this process, or faster."""
    least, most = trial.set_up_s
    start_s = figures["start_s"] if trial.method == GATHERS else inf  # others have such workers in each epoch
    trial.set_up_s = start_s + least / available_cores(), start_s + most


def time_parts(dataset: Any, collate: Callable[[Any], Any], indices: Sequence[int]) -> dict[str, float]:
    """Seconds per sample of reading, of each transform by its class, and of collating, in one process."""
    times: dict[str, float] = defaultdict(float)
    held = [(owner, name, vars(owner)[name]) for owner, name in transform_attributes(dataset)]
    whole = "decoding and reading" if held else "reading and transforms"

    def transform(original: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        began = perf_counter()
        steps = [original] if named else flatten(original)
        for step in steps:
            started = perf_counter()
            inputs = (step(*inputs, **named),) if named else apply([step], inputs)
            times[getattr(step, "__name__", type(step).__name__)] += perf_counter() - started
        times[whole] -= perf_counter() - began
        return inputs if len(inputs) > 1 else inputs[0]

    try:
        for owner, name, original in held:
            vars(owner)[name] = partial(transform, original)
        started = perf_counter()
        read = getattr(dataset, "__getitems__", None)
        samples = read(list(indices)) if read else [dataset[index] for index in indices]
        times[whole] += perf_counter() - started
    finally:
        for owner, name, original in held:
            vars(owner)[name] = original
    started = perf_counter()
    collate(samples)
    times["collate"] = perf_counter() - started
    return {name: seconds / len(indices) for name, seconds in times.items()}
