"""An audit finds what a loader does wrong, says where, and passes what is right."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from tests.conftest import REPOSITORY
from tests.support.audits import BATCH_SIZE, ENDED, SAMPLES, CustomLoader, audit_small, failed, finding, plain
from tests.support.pages import blocks
from vitmnist import audit
from vitmnist.data.seeding import changed_generators, generator_states, seed_generators
from vitmnist.diagnosis import audit_promises as promises
from vitmnist.diagnosis.audit_promises import PROMISES
from vitmnist.errors import ConfigError
from vitmnist.runtime import leftovers


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is left is found at once, and ends with the test."""
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    before = set(multiprocessing.active_children())
    ENDED.clear()
    yield
    ENDED.set()
    for process in set(multiprocessing.active_children()) - before:
        process.kill()
        process.join()


def test_a_loader_without_faults_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    result = audit_small(CustomLoader)
    assert [one.status for one in result.properties] == ["ok"] * len(PROMISES)
    assert result.ok
    assert capsys.readouterr().out == f"{result}\n"


WORKERS = "0 and 2 workers: epoch 0, batch 0"
MIDDLE = "epoch(number, start) at epoch 1, batch 6 of 13: epoch 1, batch 6: expected index 31"
FAULTS = {  # the promise that each breaks, and what the report says
    "repeats index 7": ("each_index_once", "epoch 0: index 7 came twice; such indices: 1"),
    "leaves out index 7": ("each_index_once", "epoch 0: index 7 never came; such indices: 1"),
    "same order": ("order_differs", "epochs 0 and 1 have the same order: 0, 1, 2, 3, 4, …"),
    "order depends on workers": ("same_batches", f"{WORKERS}: expected index 2, found index 0"),
    "noise depends on workers": (
        "same_batches",
        f"{WORKERS}: the numbers of index 0 differ (torch, NumPy, Python)",
    ),
    "resume skips": ("resumes_exactly", f"{MIDDLE}, found index 36"),
    "resume repeats": ("resumes_exactly", f"{MIDDLE}, found index 26"),
    "ranks overlap": ("ranks_are_disjoint", "rank 0, rank 1: index 0 came twice; such indices: 32"),
    "ranks leave out a third": ("ranks_are_disjoint", "rank 0, rank 1: index 2 never came; such indices: 21"),
    "shared noise": (
        "streams_are_independent",
        "NumPy: the same number for epoch 0, index 0 and epoch 0, index 32",
    ),
    "same noise": ("streams_are_independent", "torch: the same number for epoch 0, index 1 and epoch 1, index 1"),
    "shares its position": ("independent_iterators", "epoch 0, batch 2: expected index 10, found index 15"),
    "reuses a buffer": ("batches_are_kept", "epoch 0, batch 0: expected index 0, found index 60"),
    "uses NumPy's generator": ("generators_left_alone", "used: NumPy with 0 workers; NumPy with 2 workers"),
    "leaves a thread": ("nothing_left_behind", "left: thread reader"),
    "leaves a process": ("nothing_left_behind", "left: process reader"),
}


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_where_it_is_and_nowhere_else(fault: str) -> None:
    promise, detail = FAULTS[fault]
    result = audit_small(partial(CustomLoader, fault=fault))
    assert finding(result, getattr(promises, promise)) == f"FAILED: {detail}"
    # A single rank leaves out a third, too.
    assert failed(result) == {promise, *(["each_index_once"] if fault == "ranks leave out a third" else [])}
    assert not result.ok


def test_a_dropped_short_batch_is_not_a_failure_unless_its_samples_never_come() -> None:
    result = audit_small(partial(CustomLoader, fault="drops the last batch"))
    dropped = "ok: 64 samples, 12 batches; a short last batch is dropped (4 samples)"
    assert finding(result, promises.each_index_once) == dropped
    assert result.ok
    few = audit_small(lambda dataset: DataLoader(dataset, BATCH_SIZE, sampler=SubsetRandomSampler(range(4, SAMPLES))))
    never = "FAILED: index 0 never came in epochs 0 and 1, whose orders differ"
    assert finding(few, promises.each_index_once) == never


def test_a_single_batch_is_too_little_for_some_checks() -> None:
    result = audit_small(lambda dataset: DataLoader(dataset, SAMPLES, shuffle=True))
    for check in (promises.resumes_exactly, promises.streams_are_independent):
        assert finding(result, check) == "not checked: an epoch has a single batch; audit more than 64 samples"


def endless(dataset: Dataset) -> Iterator[Any]:
    while True:
        yield from CustomLoader(dataset).epoch(0)


def raises(dataset: Dataset) -> Any:
    raise OSError("no such store\nand more")


@pytest.mark.parametrize(
    ("factory", "detail"),
    [
        (raises, "OSError: no such store"),
        (lambda dataset: 7, "TypeError: 'int' object is not iterable"),
        (
            lambda dataset: CustomLoader(dataset).epoch(0),
            "DataError: epoch 1 has no batch; the loader can only be iterated once",
        ),
        (endless, "DataError: epoch 0 did not end after 645 samples of a set of 64"),
        (
            lambda dataset: DataLoader(dataset, 65, drop_last=True),
            "DataError: epoch 0 has no batch; audit more than 64 samples",
        ),
        (
            lambda dataset: DataLoader(
                dataset, 5, collate_fn=lambda samples: np.stack([sample[1] for sample in samples])
            ),
            "DataError: the first value of a batch must be the indices of its samples, whole numbers [B], but is "
            "float64 [5, 3]; let the loader deliver the samples (index, noise) of the dataset as they are",
        ),
    ],
)
def test_an_error_of_the_loader_is_the_finding(factory: Callable[..., Any], detail: str) -> None:
    result = audit_small(factory)
    assert len(result.properties) == len(PROMISES)
    assert finding(result, promises.each_index_once) == f"FAILED: {detail}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 15}, "^samples=15: must be at least 16"),
        (
            {"loader_factory": lambda dataset, batch_size, seed: None},
            r"^loader_factory: cannot be called as loader_factory\(dataset, seed=0\): missing a required argument: "
            "'batch_size'; .* give other parameters a default",
        ),
        ({"loader_factory": lambda: None}, "too many positional arguments"),
        (
            {"loader_factory": DataLoader([1])},
            r"cannot be called as loader_factory\(dataset\): .* is not a callable object; write lambda",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit(**{"loader_factory": plain, **arguments})


def test_the_global_generators_stay_as_they_were() -> None:
    seed_generators(1, 2, 3)
    before = generator_states()
    audit_small(lambda dataset: DataLoader(dataset, BATCH_SIZE, shuffle=True))
    assert not changed_generators(before)


def test_the_example_of_the_documentation_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = REPOSITORY / "docs" / "loaders.md"
    (program,), (printed,) = (block for block in blocks("python", page) if "audit(" in block), blocks("text", page)
    exec(program, {"__name__": "__main__"})
    # Which samples torch's generator draws may change with its version.
    assert re.sub(r"index \d+", "index", capsys.readouterr().out) == re.sub(r"index \d+", "index", printed)
