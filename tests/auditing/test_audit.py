"""An audit finds what a loader does wrong, says where, and passes what is right."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SubsetRandomSampler

from tests.conftest import REPOSITORY
from tests.support.audits import BATCH_SIZE, ENDED, SAMPLES, CustomLoader
from tests.support.pages import blocks
from vitmnist import audit, make_loader
from vitmnist.auditing import leftovers, promises
from vitmnist.auditing.audit import Audit
from vitmnist.auditing.promises import PROMISES
from vitmnist.data.seeding import changed_generators, generator_states, seed_generators
from vitmnist.errors import ConfigError

audit_small = partial(audit, samples=SAMPLES)


def finding(result: Audit, check: Callable[..., Any]) -> str:
    """The status of a property and its detail."""
    (found,) = [one for one in result.properties if one.name == check.__doc__]
    return f"{found.status}: {found.detail}"


def failed(result: Audit) -> set[str]:
    """The names of the checks that failed."""
    return {check.__name__ for check in PROMISES if finding(result, check).startswith("FAILED")}


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
    seed_generators(1, 2, 3)
    before = generator_states()
    result = audit_small(CustomLoader)
    assert not changed_generators(before)
    assert [one.status for one in result.properties] == ["ok"] * len(PROMISES)
    assert result.ok
    assert capsys.readouterr().out == f"{result}\n"


FAULTS = {  # the promise that each breaks, and how the finding begins
    "repeats index 7": ("each_index_once", "epoch 0: index 7 came twice; such indices: 1"),
    "leaves out index 7": ("each_index_once", "epoch 0: index 7 never came; such indices: 1"),
    "same order": ("order_differs", "epochs 0 and 1 have the same order: 0, 1, 2, 3, 4, …"),
    "order depends on workers": ("same_batches", "0 and 2 workers: epoch 0, batch 0: expected samples 2, 3, 4, …"),
    "noise depends on workers": ("same_batches", "0 and 2 workers: epoch 0, batch 0: the samples 0, 1, 2, …"),
    "resume skips": ("resumes_exactly", "epoch(1, 6): epoch 1, batch 6: expected samples 31, 32, 33, …, found 36"),
    "resume repeats": ("resumes_exactly", "epoch(1, 6): epoch 1, batch 6: expected samples 31, 32, 33, …, found 26"),
    "ranks overlap": ("ranks_are_disjoint", "rank 0, rank 1: index 0 came twice; such indices: 32"),
    "ranks leave out a third": ("ranks_are_disjoint", "rank 0, rank 1: index 2 never came; such indices: 21"),
    "shared noise": ("streams_are_independent", "NumPy: the same number for epoch 0, index 0 and epoch 0, index 32"),
    "same noise": ("streams_are_independent", "torch: the same number for epoch 0, index 1 and epoch 1, index 1"),
    "shares its position": ("independent_iterators", "epoch 0, batch 2: expected samples 10, 11, 12, …, found 15"),
    "reuses a buffer": ("batches_are_kept", "epoch 0, batch 0: expected samples 0, 1, 2, …, found 60, 61, 62, …"),
    "uses NumPy's generator": ("generators_left_alone", "used: NumPy"),
    "leaves a thread": ("nothing_left_behind", "left: thread reader"),
    "leaves a process": ("nothing_left_behind", "left: process reader"),
}


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_where_it_is_and_nowhere_else(fault: str) -> None:
    promise, detail = FAULTS[fault]
    result = audit_small(partial(CustomLoader, fault=fault))
    assert finding(result, getattr(promises, promise)).startswith(f"FAILED: {detail}")
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


def distributed(dataset: Dataset, rank: int, world_size: int, seed: int = 0) -> DataLoader:
    return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, world_size, rank, seed=seed))


def test_what_a_loader_cannot_show_is_not_checked() -> None:
    one_batch = audit_small(lambda dataset: DataLoader(dataset, SAMPLES, shuffle=True))
    for check in (promises.resumes_exactly, promises.streams_are_independent):
        assert finding(one_batch, check) == "not checked: an epoch has a single batch; audit more than 64 samples"
    of_ranks = audit(distributed, samples=65)  # which are made equally long
    assert finding(of_ranks, promises.ranks_are_disjoint) == "ok: 2 ranks"
    assert finding(of_ranks, promises.order_differs).startswith("ok")  # set_epoch is called
    constant = audit_small(partial(make_loader, "ram", batch_size=BATCH_SIZE, device="cpu"))
    assert constant.ok
    found = finding(constant, promises.streams_are_independent)
    assert found == "not checked: the loader does not take random samples"


class ResumedLoader:
    """Resumes by its state, as that of torchdata."""

    def __init__(self, dataset: Dataset) -> None:
        self.loader, self.number, self.position = CustomLoader(dataset), 0, 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader.epoch(self.number, self.position):
            self.position += 1
            yield batch
        self.position = 0

    def state_dict(self) -> int:
        return self.position

    def load_state_dict(self, state: int) -> None:
        self.position = state


def test_a_loader_may_resume_by_a_state() -> None:
    found = finding(audit_small(ResumedLoader), promises.resumes_exactly)
    assert found == "ok: load_state_dict at epoch 1, batch 6 of 13"


def in_form(form: Callable[[list], Any], dataset: Dataset) -> Any:
    """A loader whose batches have another form."""
    loader = CustomLoader(dataset)
    own_epoch = loader.epoch
    loader.epoch = lambda number, start=0: map(form, own_epoch(number, start))
    return loader


@pytest.mark.parametrize(
    ("form", "has_noise"),
    [
        (lambda batch: {"index": batch[0], "more": {"noise": batch[1].numpy()}}, True),
        (lambda batch: [(index.item(), noise) for index, noise in zip(*batch, strict=True)], True),
        (lambda batch: batch[0].numpy(), False),
    ],
    ids=["dict", "list of samples", "array of indices"],
)
def test_batches_have_any_form(form: Callable[[list], Any], has_noise: bool) -> None:
    result = audit_small(partial(in_form, form))
    assert result.ok
    assert finding(result, promises.each_index_once) == "ok: 64 samples, 13 batches"
    assert finding(result, promises.streams_are_independent).startswith("ok" if has_noise else "not checked: the bat")


def endless(dataset: Dataset) -> Iterator[Any]:
    while True:
        yield from CustomLoader(dataset).epoch(0)


def raises(dataset: Dataset) -> Any:
    raise OSError("no such store\nand more")


@pytest.mark.parametrize(
    ("factory", "detail"),
    [
        (raises, "OSError: no such store"),
        (lambda dataset: CustomLoader(dataset).epoch(0), "DataError: epoch 1 has no batch; the loader can only be"),
        (endless, "DataError: epoch 0 did not end after 645 samples of a set of 64"),
        (lambda dataset: None, "the function returned NoneType, which is no loader"),
        (lambda dataset: DataLoader(dataset, 65, drop_last=True), "DataError: epoch 0 has no batch; audit more than "),
        (lambda dataset: in_form(lambda batch: batch[1], dataset), "DataError: the first value of a batch must be"),
    ],
)
def test_an_error_of_the_loader_is_the_finding(factory: Callable[..., Any], detail: str) -> None:
    result = audit_small(factory)
    assert len(result.properties) == len(PROMISES)
    assert finding(result, promises.each_index_once).startswith(f"FAILED: {detail}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 15}, "^samples=15: must be at least 16"),
        ({"loader_factory": lambda dataset, size: None}, r"missing a required argument: 'size'; .* a default"),
        ({"loader_factory": DataLoader([1])}, r"^loader_factory: cannot be called with a dataset .*; write lambda"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit(**{"loader_factory": CustomLoader, **arguments})


def test_the_example_of_the_documentation_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a plain DataLoader, which depends on its workers and uses the global generators."""
    page = REPOSITORY / "docs" / "loaders.md"
    (program,), (printed,) = (block for block in blocks("python", page) if "audit(" in block), blocks("text", page)
    exec(program, {"__name__": "__main__"})
    samples = r"samples [\d, ]+"  # which of them torch's generator draws may change with its version
    assert re.sub(samples, "", capsys.readouterr().out) == re.sub(samples, "", printed)
