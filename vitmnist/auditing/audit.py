"""Checks a data loader for what goes wrong silently, and reports which promises it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vitmnist.auditing.promises import PROMISES, WORKERS
from vitmnist.auditing.subject import Broken, ProbeDataset, Subject, Unchecked
from vitmnist.data.seeding import preserved_generators
from vitmnist.errors import ConfigError, first_line

LEAST_SAMPLES = 16  # two permutations of fewer may be equal by chance
SETTINGS = {"num_workers": WORKERS, "rank": 0, "world_size": 1, "seed": 0}


@dataclass(frozen=True)
class Property:
    """One line of the report; `detail` is the first divergence, what was checked, or why it was not."""

    name: str
    status: Literal["ok", "FAILED", "not checked"]
    detail: str

    def __str__(self) -> str:
        return f"{self.status:<11}  {self.name}: {self.detail}"


@dataclass(frozen=True)
class Audit:
    """The result of `audit`; as a string, the printed report."""

    properties: tuple[Property, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed. What was not checked did not fail."""
        return all(one.status != "FAILED" for one in self.properties)

    def __str__(self) -> str:
        return "\n".join(map(str, self.properties))


def audit(loader_factory: Callable[..., Any], *, samples: int = 1009) -> Audit:
    """Check a loader for repeated and missing samples, shared random numbers, leaks, …; print a line per property.

    Args:
        loader_factory: `loader_factory(dataset, **settings)` returns a new loader over a map-style dataset, whose
            sample i is (i, random numbers `[3]`). The loader may collate samples, but not change them. Settings are
            those of `num_workers`, `rank`, `world_size` and `seed` that the factory has as parameters; what needs
            another one is not checked. A loader is one of ours, has `epoch(number, start)` like ours, or is an iterable
            whose n-th `iter` is epoch n. `set_epoch` is called, if the loader or its sampler has it.
        samples: size of the dataset. For a full check the batch size does not divide it, and each of two workers has
            two batches or more.

    Raises:
        ConfigError: a factory that cannot be called this way, or fewer than 16 samples.
    """
    if samples < LEAST_SAMPLES:
        raise ConfigError(f"samples={samples}: must be at least {LEAST_SAMPLES}")
    dataset = ProbeDataset(samples)
    try:
        parameters = inspect.signature(loader_factory).parameters
        settings = {name: value for name, value in SETTINGS.items() if name in parameters}
        inspect.signature(loader_factory).bind(dataset, **settings)
    except TypeError as error:
        raise ConfigError(
            f"loader_factory: cannot be called with a dataset and those of {', '.join(SETTINGS)} that it declares: "
            f"{error}; write lambda dataset: DataLoader(dataset, …), and give other parameters a default"
        ) from error
    variants = {f"0 and {WORKERS} workers": {"num_workers": 0}} if "num_workers" in settings else {}
    properties = []
    with preserved_generators():
        subject = Subject(loader_factory, dataset, settings, variants).with_accepted_samples()
        for promise in PROMISES:
            properties.append(_report(promise, subject))
            print(properties[-1], flush=True)  # some loaders take seconds to start
    return Audit(tuple(properties))


def _report(promise: Callable[[Subject], str], subject: Subject) -> Property:
    name = str(promise.__doc__)
    try:
        return Property(name, "ok", promise(subject))
    except Unchecked as reason:
        return Property(name, "not checked", str(reason))
    except Exception as error:  # a loader may fail in any way
        kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        return Property(name, "FAILED", f"{kind}{first_line(error)}")
