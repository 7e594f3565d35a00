"""The contract that every registered loader keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.contract import check_contract
from vitmnist import make_loader
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import DataError
from vitmnist.loaders.base import LOADERS

GENERATOR = torch.Generator().manual_seed(0)
FLOATS = torch.randn(23, 3, generator=GENERATOR, dtype=torch.float64)
BYTES = torch.randint(0, 256, (23, 1, 3, 3), generator=GENERATOR, dtype=torch.uint8)
DATA = {
    "split": None,
    "pair of tensors": (FLOATS, torch.arange(46, dtype=torch.int16).view(23, 2)),
    "map-style dataset": TensorDataset(BYTES, torch.arange(23)),
}
BUILT_IN = {"ram", "gpu_slice", "cache", "disk", "auto", "prefetch"}
PLAIN = [
    {"name": "ram"},
    {"name": "gpu_slice"},
    {"name": "cache", "folder": "cache"},
    {"name": "disk", "num_workers": 0},
    *({"name": name} for name in sorted({*LOADERS.members()} - BUILT_IN)),
]
CASES = [
    *((options, data) for options in PLAIN for data in DATA),
    ({"name": "auto", "batches": 1, "candidates": ["gpu_slice", "ram"]}, "split"),
    ({"name": "prefetch"}, "split"),
    ({"name": "prefetch"}, "pair of tensors"),
    ({"name": "prefetch", "queue_size": 1, "base": "gpu_slice"}, "split"),
    ({"name": "prefetch", "base": {"name": "cache", "folder": "cache"}}, "map-style dataset"),
    # Starting processes takes most of the time, so each loader with workers is tested with one kind of data.
    ({"name": "disk", "num_workers": 2}, "pair of tensors"),
    ({"name": "prefetch", "base": {"name": "disk", "num_workers": 0}}, "map-style dataset"),  # It starts a worker.
]


@pytest.mark.parametrize(("options", "data"), CASES, ids=str)
def test_every_loader_meets_the_contract(
    options: dict[str, Any], data: str, tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_contract(data=DATA[data] or tiny.train, **options)


@pytest.mark.parametrize("name", ["disk", "ram", "cache"])
def test_only_gpu_slice_takes_tensors_on_a_device(name: str) -> None:
    there = torch.zeros(23, 3, device="meta")
    with pytest.raises(DataError, match="the tensors are on meta, not in host memory; gpu_slice leaves them there"):
        make_loader(name, (there, there), batch_size=5, device="cpu", seed=0)


@pytest.mark.parametrize("name", ["ram", "gpu_slice"])
def test_contiguous_batches_are_views(tiny: Dataset, name: str) -> None:
    inside = range(tiny.train.images.data_ptr(), tiny.train.images.data_ptr() + tiny.train.images.numel())
    with make_loader(name, tiny.train, batch_size=5, device="cpu", seed=1, shuffle="batch") as loader:
        assert all(images.data_ptr() in inside for images, _ in loader.epoch(0))
