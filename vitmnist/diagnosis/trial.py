"""Reads some samples of a script's loader after its end: what workers and decoding once cost, what takes the time."""

from __future__ import annotations

import io
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.data.decoding import PROBES
from vitmnist.diagnosis.alternatives import decode_part
from vitmnist.errors import ConfigError
from vitmnist.loaders.timing import reason
from vitmnist.replacement.decoded_dataset import DecodedDataset, TransformedDataset
from vitmnist.replacement.halves import apply, flatten, places
from vitmnist.replacement.keep_samples import decoding_workers
from vitmnist.replacement.original import COMPARED, check_iteration, check_replaceable, read_batch
from vitmnist.runtime.memory import DoesNotFitError

ASKED = 16  # samples that are read; fewer of slow ones
READING_S = 0.3  # for reading each of them once
QUICK_S = 0.004  # samples below it are so quick that copying them counts, so more of them are decoded
DECODING_S = 0.4  # for those
SPAWN_S = 5.0  # to start workers that import the script again, which is not tried
NOTICEABLE_PART = 0.03  # of the time of a sample


@dataclass
class Trial:
    """What was measured; times in seconds.

    Args:
        set_up_s: to decode all samples.
        batch_s: to make a batch of decoded samples in the main process.
        is_random: whether some transforms are applied each time, in the workers of the original.
    """

    refused: str | None = None
    set_up_s: float = 0.0
    memory_bytes: int = 0
    batch_s: float = 0.0
    is_random: bool = False
    parts: dict[str, float] = field(default_factory=dict)


def try_samples(dataset: Any, collate: Any, kind: type, figures: dict[str, Any]) -> Trial | None:
    """Try `from_dataloader` with a few samples of a loader; None if they are decoded already."""
    if isinstance(dataset, DecodedDataset):
        return None
    trial = Trial()
    try:
        if not issubclass(kind, DataLoader):
            raise ConfigError(f"{kind.__module__}.{kind.__name__} is no torch.utils.data.DataLoader")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the samples may print
            check_iteration(kind)
            # Spawned workers would import the script again; its own restarts say how long that takes.
            workers = figures["num_workers"] if figures["start_method"] == "fork" else 0
            loader = DataLoader(dataset, figures["batch_size"] or ASKED, collate_fn=collate, num_workers=workers)
            check_replaceable(loader)
            _try(loader, trial)
    except DoesNotFitError:  # in memory; a file may have room
        trial.refused = None
    except Exception as error:  # samples and collate function may fail in any way
        # Where `decode_part` keeps samples.
        trial.refused = reason(error, "dataloader").removeprefix("ram: ")
    return trial


def _try(loader: DataLoader[Any], trial: Trial) -> None:
    dataset: Any = loader.dataset
    size, started = len(dataset), perf_counter()
    dataset[0]
    asked = min(ASKED, size, max(2, int(READING_S / (perf_counter() - started))))
    indices = range(0, size, max(size // asked, 1))[:asked]
    trial.parts = time_parts(dataset, loader.collate_fn, indices)
    read_s = sum(trial.parts.values())
    set_up_s, replaced = _decode(loader, indices, trial)
    # Of all samples, more are read twice, alone and in batches before the replacement is returned.
    batch_size = loader.batch_size or 1

    def checked(count: int) -> int:
        return 3 * min(PROBES, count) + min(COMPARED * batch_size, count)

    each_s = read_s / max(decoding_workers(loader), 1)
    if read_s < QUICK_S and size > asked:
        more = min(size, asked + int(DECODING_S / each_s))
        longer_s, replaced = _decode(loader, range(more), trial)
        reading_s = longer_s - set_up_s - (checked(more) - checked(asked)) * read_s
        set_up_s, asked, each_s = longer_s, more, max(reading_s / (more - asked), each_s)
    trial.set_up_s = set_up_s + (checked(size) - checked(asked)) * read_s + (size - asked) * each_s
    trial.is_random = isinstance(replaced.dataset, TransformedDataset)
    few = range(min(batch_size, asked))
    times = []
    for _ in range(5):
        started = perf_counter()
        read_batch(replaced.dataset, replaced.collate_fn, few)
        times.append((perf_counter() - started) * batch_size / len(few))
    trial.batch_s = median(times)


def _decode(loader: DataLoader[Any], indices: Sequence[int], trial: Trial) -> tuple[float, DataLoader[Any]]:
    started = perf_counter()
    replaced, trial.memory_bytes = decode_part(loader, indices)
    return perf_counter() - started, replaced


def time_parts(dataset: Any, collate: Callable[[Any], Any], indices: Sequence[int]) -> dict[str, float]:
    """Seconds per sample of reading, of each transform by its class, and of collating, in one process."""
    times: dict[str, float] = defaultdict(float)
    held = [(owner, name, vars(owner)[name]) for owner, name in places(dataset)]
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


def worker_start_s(workers: int, start_method: str) -> float:
    """Seconds to start and end some workers of this process, measured once."""
    if start_method != "fork":
        return SPAWN_S
    loader: Any = DataLoader(range(workers), batch_size=None, num_workers=workers, timeout=10)  # type: ignore[arg-type]
    loader.is_internal = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of more workers than cores
        started = perf_counter()
        for _ in loader:
            pass
    return perf_counter() - started
