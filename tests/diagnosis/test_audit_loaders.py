"""What an audit says of the loaders that people use, and which batches it understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.audits import BATCH_SIZE, CustomLoader, audit_small, failed, finding, plain
from vitmnist import audit, make_loader
from vitmnist.diagnosis import audit_promises as promises


def test_a_plain_dataloader_depends_on_its_workers_and_uses_the_global_generators() -> None:
    result = audit_small(plain)
    assert failed(result) == {"same_batches", "generators_left_alone"}
    workers = finding(result, promises.same_batches)
    assert "epoch 0, batch 0: the numbers of index" in workers
    assert workers.endswith("differ (torch, NumPy, Python)")
    assert finding(result, promises.generators_left_alone) == (
        "FAILED: used: torch, NumPy, Python with 0 workers; torch with 2 workers"
    )
    assert finding(result, promises.resumes_exactly).startswith(
        "not checked: the loader has neither epoch(number, start) nor"
    )
    assert finding(result, promises.ranks_are_disjoint) == "not checked: the factory takes no rank and no world_size"


@pytest.mark.parametrize("size", [64, 65])
def test_ranks_may_be_made_equally_long(size: int) -> None:
    def distributed(dataset: Dataset, rank: int, world_size: int, seed: int = 0) -> DataLoader:
        return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, world_size, rank, seed=seed))

    result = audit(distributed, samples=size)
    found = finding(result, promises.ranks_are_disjoint)
    assert found == "ok: 2 ranks"
    assert finding(result, promises.order_differs).startswith("ok")  # set_epoch is called


def test_a_loader_that_refuses_random_samples_is_checked_with_constant_ones() -> None:
    result = audit_small(partial(make_loader, "ram", batch_size=BATCH_SIZE, device="cpu"))
    assert result.ok
    assert finding(result, promises.streams_are_independent).startswith(
        "not checked: the loader does not take random samples: ram: sample 0 differs between epochs 0 and 1"
    )


class ResumedIterator:
    """An epoch and its iterator, which resumes by its state, as that of grain."""

    def __init__(self, dataset: Dataset) -> None:
        self.loader, self.number, self.position = CustomLoader(dataset), 0, 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self.loader.epoch(self.number, self.position):
            self.position += 1
            return batch
        self.position = 0
        raise StopIteration

    def get_state(self) -> int:
        return self.position

    def set_state(self, state: int) -> None:
        self.position = state


class ResumedLoader(ResumedIterator):
    """Resumes by the state of the loader, as that of torchdata."""

    state_dict, load_state_dict = ResumedIterator.get_state, ResumedIterator.set_state


@pytest.mark.parametrize(("loader", "method"), [(ResumedIterator, "set_state"), (ResumedLoader, "load_state_dict")])
def test_a_loader_may_resume_by_a_state(loader: type, method: str) -> None:
    assert finding(audit_small(loader), promises.resumes_exactly) == f"ok: {method} at epoch 1, batch 6 of 13"


class Stream:
    """Epochs in another form of batch."""

    def __init__(self, dataset: Dataset, form: Callable[[list], Any]) -> None:
        self.dataset, self.form, self.number = dataset, form, -1

    def __iter__(self) -> Iterator[Any]:
        self.number += 1
        for batch in CustomLoader(self.dataset).epoch(self.number):
            yield self.form(batch)


@pytest.mark.parametrize(
    ("form", "has_noise"),
    [
        (tuple, True),
        (lambda batch: {"index": batch[0], "more": {"noise": batch[1]}}, True),
        (lambda batch: [part.numpy() for part in batch], True),
        (lambda batch: [(index.item(), noise) for index, noise in zip(*batch, strict=True)], True),
        (lambda batch: batch[0].numpy(), False),
    ],
    ids=["tuple", "dict", "NumPy", "list of samples", "array of indices"],
)
def test_batches_have_any_form(form: Callable[[list], Any], has_noise: bool) -> None:
    result = audit_small(lambda dataset: Stream(dataset, form))
    assert result.ok
    assert finding(result, promises.each_index_once) == "ok: 64 samples, 13 batches"
    assert finding(result, promises.streams_are_independent) == (
        "ok: torch, NumPy, Python; 2 epochs"
        if has_noise
        else "not checked: the batches do not have the noise of the samples"
    )
