"""Samples of any kind are kept as they are, in memory that workers share, or in files that are complete."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, get_worker_info
from torchvision import transforms as v1
from torchvision import tv_tensors

from tests.support.pictures import Pictures, assert_same, check_same, draw, run
from tests.support.samples import Pairs
from vitmnist import from_dataloader
from vitmnist.data.difference import find_difference
from vitmnist.errors import DataError
from vitmnist.replacement import keep_samples
from vitmnist.replacement.encoding import MODES
from vitmnist.replacement.keep_samples import Store
from vitmnist.replacement.samples import Samples, encode

FLIP = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])


VALUES: list[Any] = [
    *(0, -1, 2**63 - 1, -(2**63), True, False, 0.1, -0.0, float("inf"), "", "text", "é\udcff", b"".decode()),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.zeros((0, 3)), np.arange(6, dtype=np.uint16).reshape(2, 3)),
    *(np.arange(12).reshape(3, 4)[::-1, ::2], np.array(3.5), np.array([True]), np.complex64(1j)),
    *(torch.tensor(4), torch.zeros(0, 2), torch.rand(2, 3, dtype=torch.float64), torch.rand(3).bfloat16()),
    *(torch.tensor([float("nan"), 1.0]), torch.zeros(1, 2, 1, 2, 1), torch.tensor([True])),
    *(tv_tensors.Image(torch.zeros(3, 2, 2, dtype=torch.uint8)), tv_tensors.Mask(torch.ones(2, 2))),
    *({"a": [1, (2.0, "b")], "c": {}}, OrderedDict(x=1), [], ()),
    *(draw(3).convert("L").convert(mode).convert(mode) for mode in MODES if mode not in ("LAB", "I;16")),
    draw(3, "I;16"),
]  # fmt: skip


def kept(samples: list[Any]) -> Samples:
    store = Store("ram", torch.device("cpu"), Path(), None)
    return keep_samples.keep_samples(samples, range(len(samples)), DataLoader(samples), store)  # type: ignore[arg-type]


def test_values_are_kept_as_they_are() -> None:
    for value in VALUES:
        sample = {"one": value, "label": 7}
        found = kept([sample] * 3)[1]
        assert found["label"] == 7
        if isinstance(value, np.ndarray):
            assert (found["one"].dtype, found["one"].tolist()) == (value.dtype, value.tolist())
        else:
            assert find_difference(found["one"], value) is None, value


def test_what_cannot_be_kept_is_named() -> None:
    for value in (
        *(2**63, None, b"bytes", object(), {1, 2}, np.array(["a"]), np.array([None]), torch.zeros(1, 1, 1, 1, 1, 1)),
        *(draw(1, "P"), torch.zeros(2).to_sparse(), Path("file"), np.datetime64("2026-01-01"), np.str_("text")),
    ):
        named = "a picture of mode P" if isinstance(value, Image.Image) else f"an? {type(value).__name__}"
        with pytest.raises(DataError, match=f"a sample has {named}; a file keeps only pictures, tens.*use ram"):
            encode({"one": value}, tree_structure({"one": 0}), for_file=True)
    with pytest.raises(DataError, match="the samples differ in their structure"):
        encode([1, 2], tree_structure([0]), for_file=True)


def address(samples: list[Any]) -> int:
    """A collate function that tells where the worker has the samples."""
    return int(get_worker_info().dataset._samples.content.data_ptr())


def test_forked_workers_share_the_memory(folder: Path) -> None:
    dataset = from_dataloader(DataLoader(Pictures(folder, FLIP), 4, num_workers=2), "ram").dataset
    addresses = set(DataLoader(dataset, 4, num_workers=2, collate_fn=address))
    assert addresses == {dataset._samples.content.data_ptr()}


class Doubled:
    """Its `repr` has its address, which is another one in each process."""

    def __call__(self, image: Any) -> Any:
        return image.resize((2 * image.width, 2 * image.height))


def test_later_replacements_find_the_files_by_their_fingerprint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, chunks = [], keep_samples.read_chunks
    monkeypatch.setattr(keep_samples, "read_chunks", lambda *parts: decoded.append(1) or chunks(*parts))
    stored: dict[str, Any] = {"loader": "cache", "folder": str(tmp_path), "fingerprint": "pictures"}
    for _ in range(2):
        dataset = Pictures(folder, v1.Compose([Doubled(), FLIP]))
        check_same(lambda dataset=dataset: DataLoader(dataset, 4, True), **stored)
        assert len(decoded) == 1
    dataset.paths.reverse()
    with pytest.raises(DataError, match=r"the samples of this fingerprint= do not fit$"):
        from_dataloader(DataLoader(dataset, 4), **stored)


def look_at_dataset(worker: int) -> None:
    dataset = get_worker_info().dataset
    assert len(dataset.paths) if hasattr(dataset, "paths") else dataset.classes


@pytest.mark.slow  # each worker imports torch
def test_spawned_workers_which_see_the_dataset(folder: Path, tmp_path: Path) -> None:
    for dataset, name in ((Pictures(folder, FLIP), "ram"), (Pairs(), "cache")):
        settings = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": look_at_dataset}
        spawned = DataLoader(dataset, 4, True, multiprocessing_context="spawn", **settings)
        replaced = from_dataloader(spawned, name, folder=str(tmp_path))
        assert replaced.num_workers == 1
        assert_same(run(replaced, 1), run(DataLoader(dataset, 4, True, **settings), 1))


def test_pictures_of_any_kind_stay_as_they_are(tmp_path: Path) -> None:
    for number, mode in enumerate(["RGB", "L", "RGBA", "I;16", "1", "LA", "CMYK", "P"] * 3):
        (tmp_path / "all").mkdir(exist_ok=True)
        image = draw(number, "I;16") if mode == "I;16" else draw(number).convert(mode)
        image.save(tmp_path / "all" / f"{number:02}.{'tif' if mode == 'CMYK' else 'png'}")
    dataset = Pictures(tmp_path, v1.RandomCrop(16), convert=None)
    check_same(lambda: DataLoader(dataset, 4, shuffle=True, collate_fn=list))


class Sometimes(Pictures):
    """Samples with and without a transform, of varying structure."""

    def __getitem__(self, index: int) -> Any:
        image = self.open(index)
        return (self.transform(image), {"boxes": [1.0] * index}) if index % 2 else v1.functional.to_tensor(image)


def test_random_samples_of_varying_structure(folder: Path) -> None:
    for settings in ({}, {"num_workers": 2}):
        check_same(partial(DataLoader, Sometimes(folder, FLIP), 4, True, collate_fn=list, **settings))
