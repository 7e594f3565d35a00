"""An audit finds the faults of a loader, says where they are, and passes a loader without faults."""

import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SubsetRandomSampler

from tests.support.pages import blocks
from tests.support.processes import REPOSITORY, skip_without
from vitmnist import audit, auditing, make_loader
from vitmnist.auditing import AuditReport, CheckResult
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import collate_samples, read_samples
from vitmnist.runtime.random_state import RandomState, seed_generators

SAMPLES = 64
BATCH_SIZE = 5
ENDED = threading.Event()
audit_small = partial(audit, samples=SAMPLES)
ONCE, ORDER, SAME, RESUMED, STREAMS, LEFT = PROMISES = (
    "an epoch has every index once",
    "epochs have different orders",
    "batches depend on the seed and the epoch alone",
    "a resumed epoch neither skips nor repeats",
    "samples do not share random numbers",
    "an abandoned epoch and a closed loader leave nothing running",
)


class CustomLoader:
    """Epoch e of 64 samples in batches of 5 is e, e + 1, …, 63, 0, …; `fault` breaks a promise."""

    def __init__(self, dataset: Dataset, num_workers: int = 0, seed: int = 0, fault: str = "") -> None:
        self.dataset, self.workers, self.seed, self.fault = dataset, num_workers, seed, fault
        if fault == "leaves a thread":
            threading.Thread(target=ENDED.wait, name="leftover", daemon=True).start()
        if fault == "leaves a process":
            skip_without("fork")
            forkserver = multiprocessing.get_context("forkserver")
            forkserver.Process(target=time.sleep, args=(60,), name="leftover", daemon=True).start()

    def indices(self, number: int) -> list[int]:
        shift = {"same order": 0, "order depends on workers": number + self.workers}.get(self.fault, number)
        indices = [(index + shift) % SAMPLES for index in range(SAMPLES)]
        if self.fault == "leaves out index 7":
            indices.remove(7)
        if self.fault == "repeats index 7":
            indices.insert(indices.index(7) + BATCH_SIZE, 7)
        return indices

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        indices = self.indices(number)
        batches = [indices[first : first + BATCH_SIZE] for first in range(0, len(indices), BATCH_SIZE)]
        del batches[len(batches) - (self.fault == "drops the last batch") :]
        start += self.fault == "resume skips" and start > 0
        for batch in batches[start:]:
            seed = self.seed + (self.workers if self.fault == "noise depends on workers" else 0)
            samples = read_samples(self.dataset, batch, seed, number)
            if self.fault == "shared noise":
                for index, noise in samples:
                    noise[1] = index % 32
            yield collate_samples(samples, batch)


def find_result(report: AuditReport, name: str) -> str:
    (result,) = [result for result in report.results if result.name == name]
    return f"{result.status}: {result.detail}"


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find leftovers without waiting, and end them with the test."""
    monkeypatch.setattr(auditing, "GRACE_S", 0.1)
    before = set(multiprocessing.active_children())
    ENDED.clear()
    yield
    ENDED.set()
    for process in set(multiprocessing.active_children()) - before:
        process.kill()
        process.join()


def test_a_loader_without_faults_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    seed_generators(1, 2, 3)
    before = RandomState()
    report = audit_small(CustomLoader, strict=True)
    assert not before.list_changed()
    assert [(check.name, check.status) for check in report.results] == [(name, "ok") for name in PROMISES]
    assert report.ok
    assert capsys.readouterr().out == f"{report}\n"


# Each fault with the promise that it breaks, and the start of the detail.
FAULTS = {
    "repeats index 7": (ONCE, "epoch 0: index 7 came twice; such indices: 1"),
    "leaves out index 7": (ONCE, "epoch 0: 1 indices never came, such as 7"),
    "same order": (ORDER, "epochs 0 and 1 have the same order: 0, 1, 2, 3, 4, …"),
    "order depends on workers": (SAME, "0 and 2 workers: epoch 0, batch 0: expected samples [2, 3, 4]…, found [0, "),
    "noise depends on workers": (SAME, "0 and 2 workers: epoch 0, batch 0: the samples [0, 1, 2]… have other values"),
    "resume skips": (RESUMED, "epoch(1, 6), batch 6: expected samples [31, 32, 33]…, found [36, 37, 38]…"),
    "shared noise": (STREAMS, "NumPy: 96 of 128 samples share their number with another"),
    "leaves a thread": (LEFT, "left: thread leftover"),
    "leaves a process": (LEFT, "left: process leftover"),
}


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_where_it_is_and_nowhere_else(fault: str) -> None:
    promise, detail = FAULTS[fault]
    report = audit_small(partial(CustomLoader, fault=fault))
    assert find_result(report, promise).startswith(f"FAILED: {detail}")
    failed = {check.name for check in report.results if check.status == "FAILED"}
    assert failed - ({STREAMS} if fault == "repeats index 7" else set()) == {promise}
    assert not report.ok
    with pytest.raises(AssertionError, match=f"^{promise}: {re.escape(detail)}"):
        audit_small(partial(CustomLoader, fault=fault), strict=True)


def test_a_loader_without_settings_is_built_twice_and_compared() -> None:
    seeds = count()

    def build(dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(next(seeds)))

    assert find_result(audit_small(build), SAME).startswith("FAILED: built twice: epoch 0, batch 0: expected samples")


def test_what_a_loader_cannot_show_is_not_checked_and_a_dropped_short_batch_is_no_failure() -> None:
    short = audit_small(partial(CustomLoader, fault="drops the last batch"))
    assert (short.ok, find_result(short, ONCE)) == (True, "ok: 64 samples, 12 batches, 4 samples dropped")
    few = audit_small(lambda dataset: DataLoader(dataset, BATCH_SIZE, sampler=SubsetRandomSampler(range(4, SAMPLES))))
    assert find_result(few, ONCE) == "FAILED: index 0 never came in epochs 0 and 1, whose orders differ"
    distributed = audit_small(lambda dataset: DataLoader(dataset, 5, sampler=DistributedSampler(dataset, 1, 0)))
    assert find_result(distributed, ORDER).startswith("ok")  # The audit calls set_epoch.
    constant = audit_small(partial(make_loader, "ram", batch_size=BATCH_SIZE, device="cpu"))
    assert (constant.ok, find_result(constant, STREAMS)[:42]) == (True, "not checked: the loader does not take rand")


@pytest.mark.parametrize(
    ("form", "status"),
    [
        (lambda batch: {"index": batch[0], "more": {"noise": batch[1].numpy()}}, "ok"),
        (lambda batch: batch[0].numpy(), "not checked"),
    ],
    ids=["dict", "array of indices"],
)
def test_batches_have_any_form(form: Callable[[Any], Any], status: str) -> None:
    report = audit_small(lambda dataset: map_batches(form, dataset))
    assert (report.ok, find_result(report, STREAMS).partition(":")[0]) == (True, status)


def map_batches(form: Callable[[Any], Any], dataset: Dataset) -> CustomLoader:
    loader = CustomLoader(dataset)
    own_epoch = loader.epoch
    loader.epoch = lambda number, start=0: map(form, own_epoch(number, start))
    return loader


def endless(dataset: Dataset) -> Iterator[Any]:
    while True:
        yield from CustomLoader(dataset).epoch(0)


def lacks_a_module(dataset: Dataset) -> Any:
    import nowhere_to_be_found  # noqa: F401


@pytest.mark.parametrize(
    ("factory", "detail"),
    [
        (lacks_a_module, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (lambda dataset: CustomLoader(dataset).epoch(0), "DataError: epoch 1 has no batches of 64 samples, or more"),
        (endless, "DataError: epoch 0 has 65 batches of 64 samples, or more"),
        (lambda dataset: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda dataset, size: None, "TypeError: "),
        (lambda dataset: map_batches(lambda batch: batch[1], dataset), "DataError: the first value of a batch must be"),
    ],
)
def test_a_loader_without_batches_is_one_failure(factory: Callable[..., Any], detail: str) -> None:
    (only,) = audit_small(factory).results
    assert (only.name, only.status, only.detail[: len(detail)]) == CheckResult(ONCE, "FAILED", detail)


def test_the_example_of_the_documentation_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    """The example is a plain DataLoader. Its random numbers depend on the number of workers."""
    page = REPOSITORY / "docs" / "loaders.md"
    (program,), (printed,) = (block for block in blocks("python", page) if "audit(" in block), blocks("text", page)
    exec(program, {"__name__": "__main__"})
    samples = r"samples \[[\d, ]+\]"  # The order depends on the version of torch.
    assert re.sub(samples, "", capsys.readouterr().out) == re.sub(samples, "", printed)


def test_a_balanced_loader_repeats_samples_with_other_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(dataset: Dataset, num_workers: int, seed: int, **order: Any) -> Any:
        labels = (torch.arange(len(dataset)) > 50).long()
        order = {"shuffle": "balanced", "labels": labels, **order}
        options = {"batch_size": 5, "device": "cpu", "seed": seed, "num_workers": num_workers}
        return make_loader("disk", dataset, **options, **order)

    report = audit_small(build, strict=True)
    assert report.ok
    assert report.results[0].detail == "balanced: 64 samples of 2 classes, 0 samples dropped"
    with pytest.raises(AssertionError, match="shuffle=balanced: needs the class of each image; "):
        audit_small(partial(build, labels=None), strict=True)
    draw_order = EpochSampler.draw_order
    monkeypatch.setattr(EpochSampler, "draw_order", lambda sampler, epoch: draw_order(sampler, epoch) % sampler.size)
    assert find_result(audit_small(build), STREAMS).startswith("FAILED")
