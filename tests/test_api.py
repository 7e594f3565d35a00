"""The public API without Hydra: loaders in a custom training loop, over custom data, and custom loaders."""

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.samples import Made
from vitmnist import Loader, audit, load_dataset, make_loader, register
from vitmnist.config.validation import config_field
from vitmnist.data.datasets import base
from vitmnist.data.datasets.base import DATASETS, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.errors import ConfigError, DataError
from vitmnist.loaders.base import LOADERS, Batches

PAIR = (torch.arange(10.0).view(10, 1), torch.arange(10))
COMMON = {"batch_size": 4, "device": "cpu", "seed": 0}


# PIL images, as torchvision's datasets return them without a transform
IMAGES = Made(lambda index: (Image.new("RGB", (4, 3), (index, 2 * index, 0)), index), 10)


@pytest.mark.parametrize("name", ["disk", "ram"])
def test_pil_images_become_uint8(name: str) -> None:
    with make_loader(name, IMAGES, **COMMON, **({"num_workers": 0} if name == "disk" else {})) as loader:
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
            with make_loader("ram", (images, labels), **COMMON, shuffle="none") as loader:
                batches = list(loader.epoch(0))
    finally:
        torch.set_warn_always(False)
    assert batches[1][0].data_ptr() == images[4:].ctypes.data
    assert batches[1][1].data_ptr() == labels[4:].ctypes.data
    assert batches[1][1].dtype == torch.int32


def test_prefetch_wraps_disk_for_samples_and_ram_for_tensors() -> None:
    with make_loader("prefetch", IMAGES, **COMMON) as samples, make_loader("prefetch", PAIR, **COMMON) as tensors:
        assert type(samples.base).__name__ == "WorkerLoader"
        assert type(tensors.base).__name__ == "RamLoader"


def test_load_dataset_reads_a_dataset_by_name(tiny_root: Path) -> None:
    kmnist = load_dataset("kmnist", root=str(tiny_root), train_size=5)
    assert (len(kmnist.train), len(kmnist.test)) == (5, 7)
    with pytest.raises(ConfigError, match=r"^name=kmnits: not known; did you mean 'kmnist'\?"):
        load_dataset("kmnits")
    with pytest.raises(ConfigError, match=r"^train_sise: there is no such key; did you mean 'train_size'\?"):
        load_dataset("kmnist", train_sise=3)


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
        ({"batch_size": 11, "drop_last": True}, "^batch_size=11 exceeds the 10 images, so drop_last=true leaves no ba"),
        ({"name": ["ram"]}, r"^name=\['ram'\]: not known"),
        ({"device": "mps"}, "^mps is not supported yet: float64 .* are missing there; set device=cpu$"),
        ({"device": "gpu"}, "^device=gpu: unknown device; allowed: auto, cpu, cuda"),
        ({"name": "prefetch", "base": {"name": "disk", "worker": 1}}, r"base\.worker: there is no such key"),
    ],
)
def test_an_error_names_the_wrong_argument(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(**{"name": "ram", "data": PAIR, **COMMON, **arguments})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((PAIR[0], PAIR[1][:9]), "^10 images, but 9 labels$"),
        ((PAIR[0],), r"a pair \(images, labels\) has two tensors, this one 1"),
        ((PAIR[0].tolist(), PAIR[1]), "images: must be a tensor or a NumPy array, found list"),
        ((PAIR[0], np.array(["cat"] * 10)), "labels: torch cannot use this array: can't convert .*numpy.str_"),
        ((PAIR[0], torch.tensor(3)), "labels: must have a first dimension of samples"),
        (PAIR[0], "pair of tensors, nor a map-style"),
        ({"images": PAIR[0]}, "dict is neither a split, nor a pair of tensors, nor a map-style dataset"),
        (Made(lambda index: (index,) * 3, 3), "samples from 0 on are no pairs of .*: their batch is a tuple of Tens"),
        (torch.utils.data.TensorDataset(PAIR[0][:0], PAIR[1][:0]), "the dataset is empty"),
    ],
)
def test_unusable_data_is_refused_with_a_reason(data: object, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make_loader("ram", data, **COMMON)


def test_a_dataset_is_not_a_split(tiny: base.Dataset) -> None:
    with pytest.raises(DataError, match="pass one split of a dataset with several"):
        make_loader("ram", tiny, **COMMON)


def test_a_split_of_the_wrong_dtype_or_shape_is_refused() -> None:
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    for values, message in (
        ((images.float(), labels), "images: must be uint8"),
        ((images[:, 0], labels), r"found torch.uint8 \[3, 4, 4\]"),
        ((images, labels.float()), "labels: must be int64 .*, one per image"),
        ((images, torch.zeros(3, 20)), r"float32 \[3, 20\]; .* one-hot; for several labels or masks .*from_dataloader"),
        ((images, torch.zeros(3, 4, 4, dtype=torch.int64)), r"int64 \[3, 4, 4\]; .* or masks keep your own training"),
    ):
        with pytest.raises(DataError, match=message):
            Split(*values, (0.5,), (0.5,), ("only",))


def test_a_registered_name_is_not_taken_again() -> None:
    """This also holds for a `partial`, which has no name."""
    DATASETS.members()
    with pytest.raises(ValueError, match="data/dataset: 'fashion_mnist' is registered already"):
        DATASETS.register("fashion_mnist")(load_dataset)


@dataclass
class Options:
    """Options of the custom loader."""

    scale: int = config_field(1, at_least=1)


class Custom(Loader):
    """A loader that a user might write."""

    def __init__(self, options: Options, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.source = source

    def batches(self, epoch: int, start: int) -> Batches:
        for indices in self.sampler.batch_indices(epoch, start):
            yield self.source.read(indices, epoch)


@LOADERS.temporarily()
def test_a_registered_loader_is_checked_and_built() -> None:
    register("custom", Options)(Custom)
    audit(partial(make_loader, "custom", batch_size=4, device="cpu"), samples=23, strict=True)
    with make_loader("custom", PAIR, **COMMON, scale=2) as loader:
        assert len(list(loader.epoch(0))) == 3
    with pytest.raises(ConfigError, match=r"^scale=0: must be at least 1"):
        make_loader("custom", PAIR, **COMMON, scale=0)
    with make_loader("prefetch", PAIR, **COMMON, base="custom") as loader:
        assert len(list(loader.epoch(0))) == 3
