"""With only a part of the set on the device the batches are the same, and the bytes of the rest cross the bus."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.support.eager_backend import DEVICE, EagerBackend
from vitmnist import check_loader, make_loader
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.rank_sampler import RankSampler
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.loaders import make_loader as make_loader_module
from vitmnist.loaders.auto import AutoOptions, select_loader
from vitmnist.loaders.base import LOADERS, Loader, needs_of
from vitmnist.loaders.cache import CacheOptions, map_from_cache
from vitmnist.loaders.residency import BATCHES, resident_fraction, with_resident_fraction
from vitmnist.runtime import backend as backend_module
from vitmnist.runtime import memory
from vitmnist.runtime.memory import DoesNotFitError, Memory

ROW = 800  # bytes of an image and its label
SIZE = 1000
BATCH = 10
INDICES = 16 * SIZE
GENERATOR = torch.Generator().manual_seed(0)
TENSORS = TensorSet(
    torch.randint(0, 256, (SIZE, ROW - 8), generator=GENERATOR, dtype=torch.uint8),
    torch.randint(0, 10, (SIZE,), generator=GENERATOR),
)
SAMPLER = EpochSampler(SIZE, BATCH, 3)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> EagerBackend:
    """That of `DEVICE`, which is also what `device="cpu"` names."""
    eager = EagerBackend(DEVICE)
    monkeypatch.setitem(backend_module.BACKENDS, DEVICE.type, lambda device: eager)
    monkeypatch.setattr(make_loader_module, "choose_device", lambda name: DEVICE)
    return eager


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=nbytes))


def build(resident: object, data: TensorSet = TENSORS, sampler: EpochSampler = SAMPLER) -> Loader:
    return LOADERS.build({"name": "gpu_slice", "resident": resident}, data, sampler, DEVICE)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("resident", "kind"), [(0, "pair of tensors"), (0.5, "split"), (0.5, "mapped")])
def test_contract_with_a_part_on_the_device(resident: float, kind: str, tiny: Dataset, tmp_path: Path) -> None:
    if kind == "mapped":
        data = map_from_cache(tiny.train, CacheOptions(folder=str(tmp_path)), seed=0)
    elif kind == "split":
        data = tiny.train
    else:
        data = (torch.randn(23, 3, dtype=torch.float64), torch.arange(46, dtype=torch.int16).view(23, 2))
    check_loader("gpu_slice", data, resident=resident)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("resident", [0, 0.001, 0.5, 1])
@pytest.mark.parametrize("shuffle", ["sample", "batch", "none"])
def test_every_rank_gets_its_part_of_the_same_batches(resident: float, shuffle: str) -> None:
    whole = EpochSampler(SIZE, 300, 3, shuffle)
    for rank in range(3):
        sampler = RankSampler.of(whole, rank, 3)
        expected = [(TENSORS.images[rows], TENSORS.labels[rows]) for rows in sampler.batches(1)]
        with build(resident, sampler=sampler) as loader:
            assert_close(list(loader.epoch(1)), expected, rtol=0, atol=0)
            assert_close(list(loader.epoch(1, start=2)), expected[2:], rtol=0, atol=0)


def epoch_nbytes(backend: EagerBackend, resident: float) -> int:
    with build(resident) as loader:
        before = backend.copied_nbytes
        assert sum(len(labels) for _, labels in loader.epoch(0)) == SIZE
        return backend.copied_nbytes - before


def test_bytes_over_the_bus_are_those_of_the_missing_part(backend: EagerBackend) -> None:
    everything = epoch_nbytes(backend, 0)
    assert everything == TENSORS.nbytes + INDICES
    for fraction in (0.25, 0.5, 0.75):
        assert epoch_nbytes(backend, fraction) / everything == pytest.approx(1 - fraction, abs=0.01)


def test_a_set_that_fits_is_resident_as_a_whole(backend: EagerBackend) -> None:
    """Then no batch is copied."""
    for resident in ("auto", 1, 1.0):
        with build(resident) as loader:
            assert loader.resident is not None
            assert len(loader.resident) == SIZE
    assert epoch_nbytes(backend, 1) == 0
    with build(0.999) as loader:
        assert loader.resident is None


@pytest.mark.usefixtures("backend")
def test_auto_takes_all_that_fits_next_to_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staged = (INDICES + BATCHES * BATCH * ROW) / TENSORS.nbytes
    # A fifth of the free memory is left to the model.
    for nbytes, expected in ((2 * TENSORS.nbytes, 1.0), (TENSORS.nbytes, 0.8 - staged), (0, 0.0)):
        free(monkeypatch, nbytes)
        assert resident_fraction("auto", [(TENSORS, SAMPLER)], DEVICE) == pytest.approx(expected)
    free(monkeypatch, TENSORS.nbytes)
    with caplog.at_level(logging.INFO), build("auto") as loader:
        assert loader.resident is None
    assert "gpu_slice: 740 of 1,000 rows (0.6 MiB) stay on privateuseone, which leaves 0.8 MiB free" in caplog.text


@pytest.mark.usefixtures("backend")
def test_a_measured_model_is_left_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * TENSORS.nbytes)

    def fraction_next_to(model: int) -> float:
        values = {"name": "gpu_slice", "resident": "auto"}
        return with_resident_fraction(values, [(TENSORS, SAMPLER)], DEVICE, Memory(host=model))["resident"]

    assert fraction_next_to(TENSORS.nbytes // 2) == 1
    staged = INDICES + BATCHES * BATCH * ROW
    assert fraction_next_to(TENSORS.nbytes) == pytest.approx(1 - staged / TENSORS.nbytes)
    assert fraction_next_to(3 * TENSORS.nbytes // 2) == pytest.approx(0.5 - staged / TENSORS.nbytes)
    options = AutoOptions(batches=3, candidates=["gpu_slice"])
    assert select_loader(options, TENSORS, SAMPLER, DEVICE).values == {"name": "gpu_slice", "resident": 1.0}


@pytest.mark.usefixtures("backend")
def test_training_and_evaluation_set_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [(TENSORS, SAMPLER), (TensorSet(TENSORS.images[:200], TENSORS.labels[:200]), EpochSampler(200, BATCH, 3))]
    values = {"name": "gpu_slice", "resident": 0.5}
    assert with_resident_fraction(values, sets, DEVICE)["resident"] == 0.5
    free(monkeypatch, TENSORS.nbytes)
    shared = with_resident_fraction({**values, "resident": "auto"}, sets, DEVICE)
    taken = sum(needs_of(shared, *each, DEVICE).device for each in sets)
    assert 0.7 * TENSORS.nbytes < taken < 0.8 * TENSORS.nbytes


@pytest.mark.usefixtures("backend")
def test_what_does_not_fit_is_refused_with_numbers_and_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, TENSORS.nbytes // 2)
    message = (
        r"data\.loader\.resident=0\.9: takes 0\.7 MiB of memory on privateuseone, where 0\.4 MiB are free; "
        r"type data\.loader\.resident=0\.44, the largest that fits, or data\.loader\.resident=auto$"
    )
    with pytest.raises(DoesNotFitError, match=message):
        build(0.9)
    build(0.44).close()
    values = {"name": "gpu_slice", "resident": 0.9}
    with pytest.raises(DoesNotFitError, match=r"0\.4 MiB are free, and the model needs 0\.2 MiB too; .*resident=0\.19"):
        with_resident_fraction(values, [(TENSORS, SAMPLER)], DEVICE, Memory(host=TENSORS.nbytes // 4))


@pytest.mark.parametrize("resident", [-0.1, 1.01, "half", float("nan"), True])
def test_what_is_neither_auto_nor_a_fraction_is_refused(resident: object) -> None:
    with pytest.raises(ConfigError, match=r"^resident=.*: must be (a number or auto|at least 0 and at most 1)$"):
        make_loader("gpu_slice", TENSORS, batch_size=1, device="cpu", seed=0, resident=resident)
