"""`make_loader` takes any data and registered loader, gives each rank its part of a batch, and names what is wrong."""

import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.pages import blocks, write_block
from tests.support.processes import REPOSITORY, call_in_process, run_python
from tests.support.samples import Made
from vitmnist import audit, make_loader, register
from vitmnist.config.validation import config_field
from vitmnist.data.datasets import base
from vitmnist.errors import ConfigError, DataError
from vitmnist.loaders.base import LOADERS
from vitmnist.loaders.decoded import RamLoader

PAIR = torch.arange(23 * 3).view(23, 3), torch.arange(23)
ORDER = {"batch_size": 5, "device": "cpu", "seed": 0}


def labels(name: str = "ram", **options: object) -> list[list[int]]:
    with make_loader(name, PAIR, **ORDER, **options) as loader:
        return [batch.tolist() for _, batch in loader.epoch(1)]


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "prefetch", "cache", "disk"])
def test_ranks_share_the_batches_of_a_single_process(name: str, tmp_path: Path) -> None:
    options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})
    parts = [labels(name, rank=rank, world_size=2, **options) for rank in range(2)]
    assert [first + second for first, second in zip(*parts, strict=True)] == labels()


def test_the_ranks_of_torch_distributed_are_the_default(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=rank, world_size=2)
        (tmp_path / str(rank)).write_text(repr(labels()))
        torch.distributed.barrier()

    processes = [call_in_process(lambda rank=rank: run(rank)) for rank in range(2)]
    for process in processes:
        process.join(60)
    assert [eval((tmp_path / str(rank)).read_text()) for rank in range(2)] == [
        labels(rank=rank, world_size=2) for rank in range(2)
    ]


def test_a_process_of_torchrun_that_is_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .*init_process_group.*, or give rank= and world_size="):
        labels()
    labels(rank=0, world_size=1)


@pytest.mark.slow  # each rank imports torch
def test_the_documented_loop_trains_under_torchrun(tmp_path: Path) -> None:
    (script,) = (block for block in blocks("python", REPOSITORY / "docs" / "loaders.md") if "# ddp.py" in block)
    write_block(tmp_path, script)
    ended = run_python("-m", "torch.distributed.run", "--nproc-per-node=2", "ddp.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"rank (\d): 250 images per batch, loss (0\.\d+)", ended.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "rma"}, r"^name=rma: not known; did you mean 'ram'\? allowed: .*\bram\b"),
        ({"workers": 2}, r"^workers: there is no such key; allowed: none"),
        ({"shuffle": "smaple"}, r"^shuffle=smaple: did you mean 'sample'\? allowed: balanced, batch, none, sample"),
        ({"drop_last": "false"}, "^drop_last=false: must be True or False"),
        ({"batch_size": 0}, "^batch_size=0: must be a whole number, at least 1"),
        ({"batch_size": 5.5}, "^batch_size=5.5: must be a whole number"),
        ({"batch_size": True}, "^batch_size=True: must be a whole number"),
        ({"seed": "0"}, "^seed=0: must be a whole number, at least 0"),
        ({"batch_size": 24, "drop_last": True}, "^batch_size=24 exceeds the 23 images, so drop_last=true leaves no ba"),
        ({"name": ["ram"]}, r"^name=\['ram'\]: not known"),
        ({"device": "mps"}, "^mps is not supported yet: float64 .* are missing there; set device=cpu$"),
        ({"device": "gpu"}, "^device=gpu: unknown device; allowed: auto, cpu, cuda"),
        ({"name": "prefetch", "base": {"name": "disk", "worker": 1}}, r"base\.worker: there is no such key"),
        ({"rank": 1}, "belong together; give both"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be at least 0 and below world_size=2"),
        ({"rank": 0, "world_size": 6}, "batch_size=5: 6 processes train together"),
    ],
)
def test_an_error_names_the_wrong_argument(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(**{"name": "ram", "data": PAIR, **ORDER, **arguments})


@dataclass
class Options:
    """Options of the custom loader."""

    scale: int = config_field(1, at_least=1)


@LOADERS.temporarily()
def test_a_registered_loader_is_checked_and_built() -> None:
    register("custom", Options)(type("Custom", (RamLoader,), {}))
    audit(partial(make_loader, "custom", batch_size=4, device="cpu"), samples=23, strict=True)
    with make_loader("custom", PAIR, **ORDER, scale=2) as loader:
        assert len(list(loader.epoch(0))) == 5
    with pytest.raises(ConfigError, match=r"^scale=0: must be at least 1"):
        make_loader("custom", PAIR, **ORDER, scale=0)
    with make_loader("prefetch", PAIR, **ORDER, base="custom") as loader:
        assert len(list(loader.epoch(0))) == 5


def test_integers_of_numpy_are_integers() -> None:
    with make_loader("ram", PAIR, batch_size=np.int64(12), device="cpu", seed=np.uint8(1)) as loader:
        assert len(loader) == 2


# PIL images, as torchvision's datasets return them without a transform
IMAGES = Made(lambda index: (Image.new("RGB", (4, 3), (index, 2 * index, 0)), index), 10)


@pytest.mark.parametrize("name", ["disk", "ram"])
def test_pil_images_become_uint8(name: str) -> None:
    with make_loader(name, IMAGES, **ORDER, **({"num_workers": 0} if name == "disk" else {})) as loader:
        for images, labels in loader.epoch(0):
            assert images.dtype == torch.uint8
            assert images.shape[1:] == (3, 3, 4)
            assert torch.equal(images[:, 1, 0, 0].long(), 2 * labels)


@pytest.mark.parametrize("is_writable", [True, False])
def test_numpy_arrays_are_used_without_a_copy_or_a_warning(is_writable: bool) -> None:
    images, labels = np.arange(60, dtype=np.uint8).reshape(10, 1, 2, 3), np.arange(10, dtype=np.int32)
    for array in (images, labels):
        array.flags.writeable = is_writable
    torch.set_warn_always(True)  # torch shows the warning only once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with make_loader("ram", (images, labels), **ORDER, shuffle="none") as loader:
                batches = list(loader.epoch(0))
    finally:
        torch.set_warn_always(False)
    assert batches[1][0].data_ptr() == images[5:].ctypes.data
    assert batches[1][1].data_ptr() == labels[5:].ctypes.data
    assert batches[1][1].dtype == torch.int32


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((PAIR[0], PAIR[1][:9]), "^23 images, but 9 labels$"),
        ((PAIR[0],), r"a pair \(images, labels\) has two tensors, this one 1"),
        ((PAIR[0].tolist(), PAIR[1]), "images: must be a tensor or a NumPy array, found list"),
        ((PAIR[0], np.array(["cat"] * 23)), "labels: torch cannot use this array: can't convert .*numpy.str_"),
        ((PAIR[0], torch.tensor(3)), "labels: must have a first dimension of samples"),
        (PAIR[0], "pair of tensors, nor a map-style"),
        ({"images": PAIR[0]}, "dict is neither a split, nor a pair of tensors, nor a map-style dataset"),
        (Made(lambda index: (index,) * 3, 3), "samples from 0 on are no pairs of .*: their batch is a tuple of Tens"),
        (torch.utils.data.TensorDataset(PAIR[0][:0], PAIR[1][:0]), "the dataset is empty"),
    ],
)
def test_unusable_data_is_refused_with_a_reason(data: object, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make_loader("ram", data, **ORDER)


def test_a_dataset_is_not_a_split(tiny: base.Dataset) -> None:
    with pytest.raises(DataError, match="pass one split of a dataset with several"):
        make_loader("ram", tiny, **ORDER)
