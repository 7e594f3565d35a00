"""Data of a loader: images and labels of any common kind become tensors; other data is refused with a reason."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.data.datasets import base
from vitmnist.errors import ConfigError, DataError

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
