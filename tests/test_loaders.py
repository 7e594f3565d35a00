"""The contract that every registered loader keeps, and what each loader promises beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.testing import PROMISES, Case

LOADER_OPTIONS = {
    "disk": {"name": "disk", "num_workers": 0},
    "disk, 1 worker": {"name": "disk", "num_workers": 1, "persistent_workers": False},
    "disk, 2 persistent workers": {"name": "disk", "num_workers": 2},
    "ram": {"name": "ram"},
    "gpu_slice": {"name": "gpu_slice"},
    "cache": {"name": "cache"},
    "auto": {"name": "auto", "batches": 1, "candidates": {"first": {"name": "gpu_slice"}, "second": {"name": "ram"}}},
    "prefetch": {"name": "prefetch"},
    "prefetch of gpu_slice": {"name": "prefetch", "queue_size": 1, "base": "gpu_slice"},
    "prefetch of cache": {"name": "prefetch", "base": "cache"},
    "prefetch of disk, 2 workers": {"name": "prefetch", "base": {"name": "disk", "num_workers": 2}},
}
OF_SAMPLES = [name for name in LOADER_OPTIONS if "gpu_slice" not in name and name != "auto"]
CPU = torch.device("cpu")


def test_every_registered_loader_is_under_test() -> None:
    assert {options["name"] for options in LOADER_OPTIONS.values()} == set(LOADERS.names())


def case(label: str, data: object, folder: Path) -> Case:
    """The loader of LOADER_OPTIONS, which keeps what it caches in `folder`."""

    def placed(options: dict) -> dict:
        return {**options, "folder": str(folder)} if options["name"] == "cache" else options

    options = placed(LOADER_OPTIONS[label])
    if options.get("base") == "cache":
        options = {**options, "base": placed({"name": "cache"})}
    return Case.of(options["name"], data, "cpu", {key: value for key, value in options.items() if key != "name"})


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("label", LOADER_OPTIONS)
def test_contract_for_a_split(label: str, promise: Callable[[Case], None], tiny: Dataset, tmp_path: Path) -> None:
    promise(case(label, tiny.train, tmp_path))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("label", LOADER_OPTIONS)
def test_contract_for_a_pair_of_tensors(label: str, promise: Callable[[Case], None], tmp_path: Path) -> None:
    images = torch.randn(23, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    promise(case(label, (images, torch.arange(46, dtype=torch.int16).view(23, 2)), tmp_path))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("label", OF_SAMPLES)
def test_contract_for_a_map_style_data_set(label: str, promise: Callable[[Case], None], tmp_path: Path) -> None:
    images = torch.randint(0, 256, (23, 1, 3, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    promise(case(label, TensorDataset(images, torch.arange(23)), tmp_path))
