"""Checks a data loader for what goes wrong silently.

from vitmnist import audit

def build(dataset, num_workers=0):
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=num_workers)

audit(build)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from vitmnist.data.seeding import preserved_generators
from vitmnist.diagnosis.audit_case import Case, LoaderFactory
from vitmnist.diagnosis.audit_checks import CHECKS, Finding, Status
from vitmnist.errors import ConfigError, first_line

LEAST_SAMPLES = 16  # two permutations of fewer may be equal by chance


@dataclass(frozen=True)
class Property:
    """One line of the report; `detail` is the first divergence, what was checked, or why it was not."""

    name: str
    status: Status
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


def audit(loader_factory: LoaderFactory, *, samples: int = 1009) -> Audit:
    """Check a loader for repeated and missing samples, shared random numbers, leaks, …; print a line per property.

    Args:
        loader_factory: `loader_factory(dataset, **settings)` returns a new loader over a map-style data set, whose
            sample i is (i, random numbers `[3]`). The loader may collate samples, but not change them. Settings are
            those of `num_workers`, `rank`, `world_size` and `seed` that the factory has as parameters; what needs
            another one is not checked. A loader is one of ours, has `epoch(number, start)` like ours, or is an iterable
            whose n-th `iter` is epoch n. `set_epoch` is called, if the loader or its sampler has it.
        samples: size of the data set. For a full check the batch size does not divide it, and each of two workers has
            two batches or more.

    Raises:
        ConfigError: a factory that cannot be called this way, or fewer than 16 samples.
    """
    if samples < LEAST_SAMPLES:
        raise ConfigError(f"samples={samples}: must be at least {LEAST_SAMPLES}")
    Case(loader_factory, samples).check_signature()
    properties = []
    with preserved_generators():
        case = _choose_case(loader_factory, samples)
        for check in CHECKS:
            properties.append(_run(check, case))
            print(properties[-1], flush=True)  # some loaders take seconds to start
    return Audit(tuple(properties))


def _choose_case(loader_factory: LoaderFactory, samples: int) -> Case:
    """Random samples, or constant ones if the loader takes only these."""
    case = Case(loader_factory, samples)
    try:
        _ = case.epochs
    except Exception as error:
        constant = Case(loader_factory, samples, refusal=first_line(error))
        with suppress(Exception):
            _ = constant.epochs
            return constant
    return case  # if neither can be loaded, each check reports why


def _run(check: Callable[[Case], Finding], case: Case) -> Property:
    name = str(check.__doc__)
    try:
        return Property(name, *check(case))
    except Exception as error:  # a loader may fail in any way
        return Property(name, "FAILED", f"{type(error).__name__}: {first_line(error)}")
