"""An audit finds what a loader does wrong, says where, and passes what is right."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from tests.conftest import REPOSITORY
from tests.support.audits import (
    BATCH_SIZE,
    ENDED,
    SAMPLES,
    CustomLoader,
    audit_small,
    failed,
    finding,
    plain,
)
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


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(
    ("fault", "check", "detail"),
    [
        ("repeats index 7", promises.each_index_once, "index 7 came twice: epoch 0, batch 1 and epoch 0, batch 2"),
        ("leaves out index 7", promises.each_index_once, "epoch 0: index 7 never came"),
        ("same order", promises.order_differs, "epochs 0 and 1 have the same order: 0, 1, 2, 3, 4, …"),
        (
            "order depends on workers",
            promises.same_batches,
            "0 and 2 workers: epoch 0, batch 0: expected index 2, found index 0",
        ),
        (
            "noise depends on workers",
            promises.same_batches,
            "0 and 2 workers: epoch 0, batch 0: the random numbers of index 0 differ (torch, NumPy, Python)",
        ),
        (
            "resume skips",
            promises.resumes_exactly,
            "epoch(number, start) at epoch 1, batch 6 of 13: epoch 1, batch 6: expected index 31, found index 36",
        ),
        (
            "resume repeats",
            promises.resumes_exactly,
            "epoch(number, start) at epoch 1, batch 6 of 13: epoch 1, batch 6: expected index 31, found index 26",
        ),
        (
            "ranks overlap",
            promises.ranks_are_disjoint,
            "index 0 came twice: rank 0, batch 0 and rank 1, batch 0; 32 such indices",
        ),
        (
            "ranks leave out a third",
            promises.ranks_are_disjoint,
            "rank 0, rank 1: index 2 never came, nor did 20 others",
        ),
        (
            "shared noise",
            promises.streams_are_independent,
            "NumPy: the same number for epoch 0, batch 0, index 0 and epoch 0, batch 6, index 32",
        ),
        (
            "same noise",
            promises.streams_are_independent,
            "torch: the same number for epoch 0, batch 0, index 1 and epoch 1, batch 0, index 1",
        ),
        ("shares its position", promises.independent_iterators, "epoch 0, batch 2: expected index 10, found index 15"),
        ("reuses a buffer", promises.batches_are_kept, "epoch 0, batch 0: expected index 0, found index 60"),
        ("uses NumPy's generator", promises.generators_left_alone, "used: NumPy with 0 workers; NumPy with 2 workers"),
        ("leaves a thread", promises.nothing_left_behind, "left: thread reader"),
        ("leaves a process", promises.nothing_left_behind, "left: process reader"),
    ],
)
def test_each_fault_is_found_where_it_is_and_nowhere_else(fault: str, check: Callable[..., Any], detail: str) -> None:
    result = audit_small(partial(CustomLoader, fault=fault))
    assert finding(result, check) == f"FAILED: {detail}"
    expected = {check.__name__}
    if fault == "ranks leave out a third":  # a single rank leaves them out too
        expected.add("each_index_once")
    assert failed(result) == expected
    assert not result.ok


def test_a_dropped_short_batch_is_not_a_failure() -> None:
    result = audit_small(partial(CustomLoader, fault="drops the last batch"))
    assert finding(result, promises.each_index_once) == (
        "ok: 64 samples, 12 batches; a short last batch is dropped (4 samples)"
    )
    assert result.ok


def test_samples_that_are_dropped_in_every_order_are_a_failure() -> None:
    result = audit_small(
        lambda dataset: DataLoader(dataset, BATCH_SIZE, sampler=SubsetRandomSampler(range(4, SAMPLES)))
    )
    assert finding(result, promises.each_index_once) == (
        "FAILED: index 0 never came in epochs 0 and 1, whose orders differ"
    )


def test_a_single_batch_is_too_little_for_some_checks() -> None:
    result = audit_small(lambda dataset: DataLoader(dataset, SAMPLES, shuffle=True))
    for check in (promises.resumes_exactly, promises.streams_are_independent):
        assert finding(result, check) == "not checked: an epoch has a single batch; audit more than 64 samples"


def endless(dataset: Dataset) -> Iterator[Any]:
    while True:
        yield from CustomLoader(dataset).epoch(0)


def without_indices(samples: list[tuple[int, np.ndarray]]) -> np.ndarray:
    return np.stack([noise for _, noise in samples])


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
            lambda dataset: DataLoader(dataset, BATCH_SIZE, collate_fn=without_indices),
            "DataError: the first value of a batch must be the indices of its samples, whole numbers [B], but is "
            "float64 [5, 3]; let the loader deliver the samples (index, noise) of the data set as they are",
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
        ({"loader_factory": DataLoader([1])}, "^loader_factory: must be a function .* found DataLoader"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit(**{"loader_factory": plain, **arguments})


def test_the_global_generators_stay_as_they_were() -> None:
    seed_generators(1, 2, 3)
    before = generator_states()
    audit_small(plain)
    assert not changed_generators(before)


def test_the_example_of_the_documentation_prints_its_output(tmp_path: Path) -> None:
    (program,), (printed,) = (blocks(language, REPOSITORY / "docs/audit.md") for language in ("python", "text"))
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    # Which samples torch's generator draws may change with its version.
    assert re.sub(r"index \d+", "index", ended.stdout) == re.sub(r"index \d+", "index", printed)
