"""The data: the official images, verified, and clean errors for files that are not what they should be."""

import gzip
import hashlib
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision import datasets as torchvision_datasets

from tests.conftest import write_idx, write_mnist_like
from tests.support.cifar import write_cifar
from vitmnist.data.datasets.base import Dataset, load_dataset
from vitmnist.data.datasets.standard import BUNDLED_MNIST, FILES, read_idx
from vitmnist.errors import ConfigError, DataError


def test_the_bundled_mnist_equals_torchvisions_download(tmp_path: Path) -> None:
    """The files have the MD5 that torchvision checks, and the arrays that torchvision reads."""
    dataset = load_dataset("mnist", root=str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, md5 in torchvision_datasets.MNIST.resources:
        packed = BUNDLED_MNIST / name
        assert hashlib.md5(packed.read_bytes()).hexdigest() == md5
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(packed.read_bytes()))
    for split, is_train in ((dataset.train, True), (dataset.test, False)):
        reference = torchvision_datasets.MNIST(str(tmp_path), train=is_train)
        assert torch.equal(split.images[:, 0], reference.data)
        assert torch.equal(split.labels, reference.targets)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    # The constants of every MNIST tutorial.
    assert (round(dataset.train.mean[0], 4), round(dataset.train.std[0], 4)) == (0.1307, 0.3081)


def test_sizes_take_the_first_images(tiny_root: Path, tiny: Dataset) -> None:
    small = load_dataset("kmnist", root=str(tiny_root), train_size=4, test_size=3)
    assert torch.equal(small.train.images, tiny.train.images[:4])
    assert torch.equal(small.test.labels, tiny.test.labels[:3])
    with pytest.raises(ConfigError, match=r"test_size=0: must be at least 1"):
        load_dataset("kmnist", root=str(tiny_root), test_size=0)
    with pytest.raises(DataError, match="kmnist: there are no training images"):
        replace(tiny, train=tiny.train.subset(slice(0)))


def test_a_missing_set_names_the_folder_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_datasets.KMNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(DataError) as caught:
        load_dataset("kmnist", root=str(tmp_path))
    message = str(caught.value)
    assert str(tmp_path / "KMNIST" / "raw") in message
    assert "set data.root to a folder that has them" in message
    assert all(f"{name}.gz" in message for name in FILES)


DAMAGES = {
    "end-of-stream": lambda archive: archive[:-9],
    "Not a gzipped file": lambda archive: b"no archive",
    "cannot reshape array of size 22": lambda archive: gzip.compress(gzip.decompress(archive)[:-1]),
    "cannot reshape array of size 4": lambda archive: gzip.compress(b"PK\3\1" + bytes(8)),
    "unpack_from requires": lambda archive: gzip.compress(b""),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_file_that_cannot_be_unpacked_or_parsed_is_damaged(tmp_path: Path, message: str) -> None:
    write_idx(tmp_path / "labels", torch.arange(23, dtype=torch.uint8))
    path = tmp_path / "labels.gz"
    path.write_bytes(DAMAGES[message](gzip.compress((tmp_path / "labels").read_bytes(), mtime=0)))
    with pytest.raises(DataError, match=f"{path} is damaged or no IDX file of bytes: .*{message}"):
        read_idx(path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (FILES[1], torch.zeros(22, dtype=torch.uint8), "23 images, but 22 labels"),
        (FILES[1], torch.full((23,), 10, dtype=torch.uint8), "labels: must be 0 to 9, found 10 to 10"),
        (FILES[0], torch.zeros(23, 28, dtype=torch.uint8), r"images: must be \[B, C, H, W\], found \[23, 1, 28\]"),
        (FILES[2], torch.zeros(7, 28, 14, dtype=torch.uint8), r"train images \[1, 28, 28\], test images \[1, 28, 14\]"),
        (FILES[0], torch.zeros(0, 28, 28, dtype=torch.uint8), "the dataset is empty"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    tmp_path: Path, name: str, array: torch.Tensor, message: str
) -> None:
    folder = tmp_path / "KMNIST" / "raw"
    write_mnist_like(folder)
    write_idx(folder / name, array)
    with pytest.raises(DataError, match=message):
        load_dataset("kmnist", root=str(tmp_path))


SOURCES = {"cifar10": torchvision_datasets.CIFAR10, "cifar100": torchvision_datasets.CIFAR100}


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a dataset with small files in `tmp_path`."""
    write_cifar(tmp_path, SOURCES[request.param], 4, monkeypatch)
    monkeypatch.setattr(SOURCES[request.param], "url", "http://127.0.0.1:9/")
    return request.param


@pytest.mark.parametrize("packed", [False, True])
def test_the_images_equal_torchvisions(
    name: str, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[name]
    references = [source(str(tmp_path), train=is_train) for is_train in (True, False)]
    if packed:
        archive = tmp_path / source.filename
        with tarfile.open(archive, "w:gz") as opened:
            opened.add(tmp_path / source.base_folder, source.base_folder)
        shutil.rmtree(tmp_path / source.base_folder)
        monkeypatch.setattr(source, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    cifar = load_dataset(name, root=str(tmp_path))
    for split, reference in zip((cifar.train, cifar.test), references, strict=True):
        assert torch.equal(split.images, torch.from_numpy(reference.data).permute(0, 3, 1, 2))
        assert split.labels.tolist() == reference.targets
        assert list(split.classes) == reference.classes


@pytest.mark.parametrize("damage", ["truncated", "missing", "archive"])
def test_files_that_differ_from_the_published_checksum_are_refused(name: str, tmp_path: Path, damage: str) -> None:
    """The message names the archive and the folder that it belongs in."""
    source = SOURCES[name]
    path = tmp_path / source.base_folder / source.test_list[0][0]
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    if damage == "archive":
        (tmp_path / source.filename).write_bytes(b"no archive")
    with pytest.raises(DataError) as caught:
        load_dataset(name, root=str(tmp_path))
    missing, advice = str(caught.value).split("\n")
    assert missing.startswith(
        f"{source.__name__} is not in {tmp_path} as it was published, and could not be downloaded"
    )
    assert advice == f"Put {source.filename} into {tmp_path}, or set data.root to a folder that has them"
