"""CIFAR-10 and CIFAR-100: the same images as torchvision, from verified files that cannot run code."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
from torchvision import datasets as torchvision_datasets
from torchvision.transforms.functional import pil_to_tensor

from tests.conftest import Train
from tests.support.cifar import write_cifar
from vitmnist import make_loader
from vitmnist.data.datasets import Dataset, load_dataset
from vitmnist.data.datasets.cifar import ArrayUnpickler
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ConfigError, DataError

SOURCES = {"cifar10": torchvision_datasets.CIFAR10, "cifar100": torchvision_datasets.CIFAR100}
SIZE = 4  # images of a file


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a data set, of which there are small files in `tmp_path`."""
    write_cifar(tmp_path, SOURCES[request.param], SIZE, monkeypatch)
    monkeypatch.setattr(SOURCES[request.param], "url", "http://127.0.0.1:9/")
    return request.param


def load(name: str, root: Path, **sizes: int) -> Dataset:
    return load_dataset(name, root=str(root), **sizes)


def pack(folder: Path, archive: Path) -> None:
    """Move a folder into an archive."""
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("packed", [False, True])
def test_the_images_are_those_that_torchvision_reads(name: str, tmp_path: Path, packed: bool) -> None:
    source = SOURCES[name]
    references = [source(str(tmp_path), train=is_train) for is_train in (True, False)]
    if packed:
        pack(tmp_path / source.base_folder, tmp_path / source.filename)
    before = sorted(tmp_path.rglob("*"))
    cifar = load(name, tmp_path)
    for split, reference in zip((cifar.train, cifar.test), references, strict=True):
        assert torch.equal(split.images, torch.from_numpy(reference.data).permute(0, 3, 1, 2))
        assert split.labels.tolist() == reference.targets
        assert list(split.classes) == reference.classes
        reader = split.open_reader()
        assert all(torch.equal(pil_to_tensor(reader[index]), split.images[index]) for index in range(len(split)))
    assert sorted(tmp_path.rglob("*")) == before


def test_every_loader_delivers_the_images(name: str, tmp_path: Path) -> None:
    train = load(name, tmp_path, train_size=3).train
    preprocess = Preprocess(train)
    for loader_name in ("ram", "gpu_slice", "disk"):
        options = {"num_workers": 1} if loader_name == "disk" else {}
        with make_loader(loader_name, train, batch_size=3, device="cpu", seed=0, shuffle="none", **options) as loader:
            ((images, labels),) = loader.epoch(0)
        assert torch.equal(preprocess(images), preprocess(train.images))
        assert torch.equal(labels, train.labels)


def test_more_images_than_there_are_cannot_be_used(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"test_size=5: the set has {SIZE} images"):
        load(name, tmp_path, test_size=5)


class Attack:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("damage", ["attack", "truncated", "empty"])
def test_a_file_with_another_checksum_is_refused_unread(name: str, tmp_path: Path, damage: str, packed: bool) -> None:
    source = SOURCES[name]
    file, expected = source.test_list[0]
    path = tmp_path / source.base_folder / file
    contents = {"attack": pickle.dumps(Attack(tmp_path / "run")), "truncated": path.read_bytes()[:-100], "empty": b""}
    path.write_bytes(contents[damage])
    found = hashlib.md5(contents[damage]).hexdigest()
    place = tmp_path / source.filename if packed else path.parent
    if packed:
        pack(path.parent, place)
    difference = f"expected md5 {expected}, found {found}"
    with pytest.raises(DataError, match=f"{file} is not the published file: {difference}; remove {place} to download"):
        load(name, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_pickle_can_make_arrays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "attack"
    path.write_bytes(pickle.dumps(Attack(tmp_path / "run")))
    with path.open("rb") as file, pytest.raises(pickle.UnpicklingError, match="is not allowed"):
        ArrayUnpickler(file).load()
    assert not (tmp_path / "run").exists()


def test_a_truncated_archive_is_an_error(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    archive = tmp_path / source.filename
    pack(tmp_path / source.base_folder, archive)
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:5000], b"no archive"):
        archive.write_bytes(content)
        with pytest.raises(DataError, match=rf"{archive}.*; remove {archive} to download it again"):
            load(name, tmp_path)


def test_a_missing_set_names_the_archive_and_the_folder(name: str, tmp_path: Path) -> None:
    """Also if a file is missing in the folder."""
    source = SOURCES[name]
    (tmp_path / source.base_folder / source.meta["filename"]).unlink()
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    assert f"{source.__name__} is not in {tmp_path} and could not be downloaded" in str(caught.value)
    assert f"Put {source.filename} into {tmp_path}, or type data.root= and the folder that has them" in str(
        caught.value
    )


def test_a_model_that_does_not_fit_is_refused_before_anything_is_downloaded(train_here: Train, tmp_path: Path) -> None:
    refused = train_here("data/dataset=cifar10", f"data.root={tmp_path / 'root'}")
    assert "model.patch_size=7 does not divide the image of 32×32; allowed: 1, 2, 4, 8, 16, 32" in refused.stderr
    assert not (tmp_path / "root").exists()


def test_a_vision_transformer_trains_on_cifar(name: str, train_here: Train, tmp_path: Path) -> None:
    small = ("model.patch_size=8", "model.depth=1", "batch_size=4", "epochs=1", "tensorboard.images_every_epochs=null")
    done = train_here(f"data/dataset={name}", f"data.root={tmp_path}", *small)
    assert done.returncode == 0, done.stderr
