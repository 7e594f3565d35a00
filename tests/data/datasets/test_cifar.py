"""CIFAR-10 and CIFAR-100: the same images as torchvision, from files whose checksums it compares."""

import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torchvision import datasets as torchvision_datasets

from tests.support.cifar import write_cifar
from vitmnist.data.datasets.base import load_dataset
from vitmnist.errors import DataError

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
