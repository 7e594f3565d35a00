"""What an audit says of the loaders that people use, and which batches it understands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.conftest import REPOSITORY
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


def seed_numpy(worker: int) -> None:
    np.random.seed(worker)


def test_workers_that_are_seeded_alike_in_every_epoch_are_found() -> None:
    """The usual mistake: `worker_init_fn=lambda worker: np.random.seed(worker)`."""
    result = audit_small(
        lambda dataset, num_workers=0: DataLoader(
            dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers, worker_init_fn=seed_numpy
        )
    )
    assert finding(result, promises.streams_are_independent).startswith("FAILED: NumPy: the same number for epoch 0")


@pytest.mark.parametrize("size", [64, 65])
def test_ranks_may_be_made_equally_long(size: int) -> None:
    def distributed(dataset: Dataset, rank: int, world_size: int, seed: int = 0) -> DataLoader:
        return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, world_size, rank, seed=seed))

    result = audit(distributed, samples=size)
    found = finding(result, promises.ranks_are_disjoint)
    assert found == "ok: 2 ranks"
    assert finding(result, promises.order_differs).startswith("ok")  # set_epoch is called


def test_disk_passes() -> None:
    def disk(dataset: Dataset, num_workers: int = 0, seed: int = 0) -> Any:
        options = {"batch_size": BATCH_SIZE, "device": "cpu", "seed": seed, "num_workers": num_workers}
        return make_loader("disk", dataset, **options)

    result = audit_small(disk)
    assert result.ok
    assert [one.status for one in result.properties].count("not checked") == 1  # ranks


def test_a_loader_that_refuses_random_samples_is_checked_with_constant_ones() -> None:
    result = audit_small(partial(make_loader, "ram", batch_size=BATCH_SIZE, device="cpu"))
    assert result.ok
    assert finding(result, promises.streams_are_independent).startswith(
        "not checked: the loader does not take random samples: ram: sample 0 differs between epochs 0 and 1"
    )


def test_torchdata_resumes_by_its_state() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build(dataset: Dataset, num_workers: int = 0) -> Any:
        return stateful.StatefulDataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)

    result = audit_small(build)
    assert finding(result, promises.resumes_exactly).startswith("ok: load_state_dict at epoch 1, batch 6 of 13")
    assert failed(result) == {"same_batches", "generators_left_alone"}


GRAIN = """
import grain.python as grain
from vitmnist import audit

def build(dataset, seed=0, rank=0, world_size=1):
    shard = grain.ShardOptions(rank, world_size)
    sampler = grain.IndexSampler(len(dataset), shard, shuffle=True, num_epochs=1, seed=seed)
    return grain.DataLoader(data_source=dataset, sampler=sampler, operations=[grain.Batch(5)])

audit(build, samples=64)
"""


@pytest.mark.skipif(find_spec("grain") is None, reason="needs grain")
def test_grain_resumes_by_the_state_of_its_iterator() -> None:
    """In a separate process, because grain's logging may close the stderr that was current at its import."""
    ended = subprocess.run(
        [sys.executable, "-c", GRAIN], cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False
    )
    lines = {line.split(": ")[0]: line for line in ended.stdout.splitlines()}
    resumed = lines["ok           a resumed epoch neither skips nor repeats"]
    assert resumed.split(": ", 1)[1].startswith("set_state at epoch 1, batch 6 of 13")
    assert "ok           ranks do not overlap and cover the set" in lines
    # Each iterator begins at the first of its sampler's epochs.
    assert "FAILED       epochs have different orders" in lines


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
