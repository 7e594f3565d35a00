"""The data: the official images, verified, and clean errors for files that are not what they should be."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision import datasets as torchvision_datasets
from torchvision.transforms.functional import pil_to_tensor

from tests.conftest import write_idx, write_mnist_like
from vitmnist.data.datasets import Dataset, load_dataset, mnist
from vitmnist.data.datasets.idx import IdxFile, parse_idx
from vitmnist.data.datasets.mnist import FILES
from vitmnist.data.tensors import channel_statistics
from vitmnist.errors import ConfigError, DataError


def kmnist(root: Path, **sizes: int) -> Dataset:
    return load_dataset("kmnist", root=str(root), **sizes)


def test_the_bundled_mnist_is_the_one_torchvision_downloads(tmp_path: Path) -> None:
    """Same MD5 as torchvision checks, same arrays as torchvision reads."""
    dataset = load_dataset("mnist", root=str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, md5 in torchvision_datasets.MNIST.resources:
        packed = mnist.BUNDLED_MNIST / name
        assert IdxFile(packed, f"md5:{md5}", raw).read().dtype == torch.uint8
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(packed.read_bytes()))
    for split, is_train in ((dataset.train, True), (dataset.test, False)):
        reference = torchvision_datasets.MNIST(str(tmp_path), train=is_train)
        assert torch.equal(split.images[:, 0], reference.data)
        assert torch.equal(split.labels, reference.targets)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    # The constants of every MNIST tutorial.
    assert (round(dataset.train.mean[0], 4), round(dataset.train.std[0], 4)) == (0.1307, 0.3081)


def test_sizes_take_the_first_images(tiny_root: Path, tiny: Dataset) -> None:
    small = kmnist(tiny_root, train_size=4, test_size=3)
    assert torch.equal(small.train.images, tiny.train.images[:4])
    assert torch.equal(small.test.labels, tiny.test.labels[:3])
    with pytest.raises(ConfigError, match=r"data\.dataset\.train_size=24: the set has 23 images"):
        kmnist(tiny_root, train_size=24)
    with pytest.raises(ConfigError, match=r"test_size=0: must be at least 1"):
        kmnist(tiny_root, test_size=0)


@pytest.mark.parametrize("layout", ["KMNIST/raw", "KMNIST", "raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_an_existing_folder_is_used_as_it_is(
    tmp_path: Path, layout: str, packed: bool, tiny: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / layout
    write_mnist_like(folder)
    if packed:
        checksums = []
        for name in FILES:
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), mtime=0))
            (folder / name).unlink()
            checksums.append((f"{name}.gz", _md5(folder / f"{name}.gz")))
        monkeypatch.setattr(torchvision_datasets.KMNIST, "resources", checksums)
        (folder / FILES[0]).write_bytes(b"a whole .gz beside it comes first, for it can be verified")
    before = sorted(folder.rglob("*"))
    assert torch.equal(kmnist(tmp_path).train.images, tiny.train.images)
    assert sorted(folder.rglob("*")) == before


def test_a_missing_set_names_the_folder_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_datasets.KMNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(DataError) as caught:
        kmnist(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "KMNIST" / "raw") in message
    assert "type data.root= and the folder that has them" in message
    assert all(f"{name}.gz" in message for name in FILES)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_packed_file_names_both_checksums(tmp_path: Path) -> None:
    for source in mnist.BUNDLED_MNIST.glob("*.gz"):
        shutil.copy(source, tmp_path / source.name)
    damaged = tmp_path / "t10k-labels-idx1-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    found, expected = _md5(damaged), dict(torchvision_datasets.KMNIST.resources)[damaged.name]
    for name in FILES[:3]:  # the first three are whole, but not those of KMNIST
        (tmp_path / f"{name}.gz").unlink()
    write_mnist_like(tmp_path)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(DataError, match=f"{damaged} is damaged: expected md5 {expected}, found {found}"):
        kmnist(tmp_path)


def test_a_damaged_bundled_file_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "mnist"
    shutil.copytree(mnist.BUNDLED_MNIST, bundled)
    monkeypatch.setattr(mnist, "BUNDLED_MNIST", bundled)
    file = bundled / "train-images-idx3-ubyte.gz"
    content = bytearray(file.read_bytes())
    content[5_000_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file} is damaged: expected sha256 440fcabf.*, found [0-9a-f]{{64}}"):
        load_dataset("mnist", root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (FILES[1], torch.zeros(22, dtype=torch.uint8), "23 images of 28×28 for 22 labels"),
        (FILES[1], torch.full((23,), 10, dtype=torch.uint8), "has a label 10; the set has 10 classes"),
        (FILES[0], torch.zeros(23, 28, dtype=torch.uint8), "expected images"),
        (FILES[2], torch.zeros(7, 28, 14, dtype=torch.uint8), "28×28 and 28×14"),
        (FILES[0], torch.zeros(0, 28, 28, dtype=torch.uint8), "0 images"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    tmp_path: Path, name: str, array: torch.Tensor, message: str
) -> None:
    write_mnist_like(tmp_path)
    write_idx(tmp_path / name, array)
    with pytest.raises(DataError, match=message):
        kmnist(tmp_path)


def test_unpacking_is_verified_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = FILES[3]
    packed = IdxFile(mnist.BUNDLED_MNIST / f"{name}.gz", None, tmp_path / "deep" / name)
    path = packed.unpack()
    whole = path.read_bytes()
    assert torch.equal(parse_idx(whole, path), packed.read())
    untouched = path.stat().st_mtime_ns
    assert packed.unpack().stat().st_mtime_ns == untouched
    path.write_bytes(whole[:-1] + b"\x0b")
    assert packed.unpack().read_bytes() == whole
    assert "was damaged and is unpacked again" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == [name]
    with pytest.raises(DataError, match=r"cannot unpack .*data\.root=FOLDER"):
        replace(packed, unpacked=path / "raw" / name).unpack()


def test_what_the_user_keeps_in_the_root_is_not_written_to(tmp_path: Path) -> None:
    mine = tmp_path / "MNIST" / "raw" / FILES[3]
    mine.parent.mkdir(parents=True)
    mine.write_text("my own variant")
    path = load_dataset("mnist", root=str(tmp_path)).test.open_reader().path
    assert path.is_relative_to(tmp_path / mnist.UNPACKED)
    assert mine.read_text() == "my own variant"


def test_statistics_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2345, 3, 5, 4), generator=generator, dtype=torch.uint8)
    images[:, 2] = 9
    mean, std = channel_statistics(images)
    scaled = images.double() / 255
    assert torch.tensor(mean).allclose(scaled.mean(dim=(0, 2, 3)).float())
    assert torch.tensor(std[:2]).allclose(scaled.std(dim=(0, 2, 3), unbiased=False)[:2].float())
    assert std[2] == 1 / 255


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_held_out_images_are_the_last_of_the_training_set(tiny: Dataset) -> None:
    apart = tiny.held_out(5)
    assert torch.equal(apart.train.images, tiny.train.images[:18])
    assert torch.equal(apart.test.images, tiny.train.images[18:])
    assert torch.equal(apart.test.labels, tiny.train.labels[18:])
    assert apart.test.images.data_ptr() == tiny.train.images[18:].data_ptr()  # a view
    statistics = channel_statistics(tiny.train.images[:18])
    assert (apart.train.mean, apart.train.std) == (apart.test.mean, apart.test.std) == statistics
    assert statistics != (tiny.train.mean, tiny.train.std)
    assert len({*apart.sha256.values(), *tiny.sha256.values()}) == 4 + 4
    for split in (apart.train, apart.test):
        pictures = split.open_reader()
        for index in (0, len(split) - 1):
            assert torch.equal(pil_to_tensor(pictures[index]), split.images[index])


@pytest.mark.parametrize("size", [23, 100])
def test_not_all_images_can_be_held_out(tiny: Dataset, size: int) -> None:
    with pytest.raises(ConfigError, match=f"data.holdout={size}: the set has 23 training images"):
        tiny.held_out(size)
