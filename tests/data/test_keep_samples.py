"""Samples of any kind are kept as they are, in memory that workers share, or in files that are complete."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.support.pictures import Pictures, assert_same, check_same, draw, run, write_pictures
from vitmnist import from_dataloader
from vitmnist.data import decoded_cache, keep_samples
from vitmnist.data.batch_tensors import find_difference
from vitmnist.data.samples import MODES, Samples, encode
from vitmnist.errors import DataError
from vitmnist.runtime import memory
from vitmnist.runtime.memory import DoesNotFitError, Memory

v1 = pytest.importorskip("torchvision.transforms")
from torchvision import tv_tensors  # noqa: E402

FLIP = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def kept(sample: Any) -> Any:
    structure = tree_structure(sample)
    return Samples(*encode([0 * [0], sample][1:] * 3, structure), structure)[1]


VALUES: list[Any] = [
    *(0, -1, 2**63 - 1, -(2**63), True, False, 0.1, -0.0, float("inf"), "", "text", "é\udcff", b"".decode()),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.zeros((0, 3)), np.arange(6, dtype=np.uint16).reshape(2, 3)),
    *(np.arange(12).reshape(3, 4)[::-1, ::2], np.array(3.5), np.array([True]), np.complex64(1j)),
    *(torch.tensor(4), torch.zeros(0, 2), torch.rand(2, 3, dtype=torch.float64), torch.rand(3).bfloat16()),
    *(torch.tensor([float("nan"), 1.0]), torch.zeros(1, 2, 1, 2, 1), torch.tensor([True])),
    *(tv_tensors.Image(torch.zeros(3, 2, 2, dtype=torch.uint8)), tv_tensors.Mask(torch.ones(2, 2))),
    *({"a": [1, (2.0, "b")], "c": {}}, OrderedDict(x=1), [], ()),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_kept_as_they_are(value: Any) -> None:
    found = kept({"one": value, "label": 7})
    assert found["label"] == 7
    if isinstance(value, np.ndarray):
        assert (found["one"].dtype, found["one"].tolist()) == (value.dtype, value.tolist())
    else:
        assert find_difference(found["one"], value) is None


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode_are_kept_as_they_are(mode: str) -> None:
    image = draw(3, "I;16") if mode == "I;16" else draw(3).convert("L").convert(mode) if mode in "IF" else None
    if image is None:
        image = draw(3).convert("RGB").convert("LAB" if mode == "LAB" else mode) if mode != "LAB" else None
    if image is None:
        pytest.skip("PIL makes LAB of a profile alone")
    assert find_difference(kept([image]), [image]) is None


@pytest.mark.parametrize(
    "value",
    [
        *(2**63, None, b"bytes", object(), {1, 2}, np.array(["a"]), np.array([None]), torch.zeros(1, 1, 1, 1, 1, 1)),
        *(draw(1, "P"), torch.zeros(2).to_sparse(), Path("file"), np.datetime64("2026-01-01"), np.str_("text")),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(value: Any) -> None:
    named = "a picture of mode P" if isinstance(value, Image.Image) else f"an? {type(value).__name__}"
    with pytest.raises(DataError, match=f"a sample has {named}, which cannot be kept; convert it to"):
        encode([{"one": value}])


def test_a_sample_is_a_copy() -> None:
    structure = tree_structure([0])
    samples = Samples(*encode([[torch.zeros(3)], [torch.ones(3)]], structure), structure)
    samples[0][0].fill_(9.0)
    assert samples[0][0].tolist() == [0.0] * 3
    with pytest.raises(DataError, match="the samples differ in their structure"):
        encode([[1], [1, 2]], structure)


def private_bytes(address: int, size: int) -> int:
    """Bytes of a range of memory that this process has copied."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start < address + size and end > address
        elif is_inside and first == "Private_Dirty:":  # pages of a file that are mapped here alone are clean
            found += 1024 * int(rest.split()[0])
    return found


class Large(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = v1.RandomHorizontalFlip()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((1, 1024, 1024), index, dtype=torch.uint8))


def reporting(samples: list[Any]) -> tuple[int, int]:
    """A collate function that looks at the memory of the process it runs in."""
    content = get_worker_info().dataset._samples.content
    return content.data_ptr(), private_bytes(content.data_ptr(), content.nbytes)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
@pytest.mark.parametrize("name", ["ram", "cache"])
def test_forked_workers_share_the_memory(name: str, tmp_path: Path) -> None:
    loader = from_dataloader(DataLoader(Large(), 4, num_workers=2), name, folder=str(tmp_path))
    content = loader.dataset._samples.content
    assert content.nbytes == 64 * 2**20
    looking = DataLoader(loader.dataset, 4, num_workers=2, collate_fn=reporting)
    for address, private in looking:
        assert address == content.data_ptr()
        assert private < 2**20


class Reads(Pictures):
    """Leaves a file for each read of a sample."""

    def open(self, index: int) -> Any:
        with (self.root.parent / "reads").open("a") as file:
            file.write(f"{index}\n")
        return super().open(index)


def reads(folder: Path) -> int:
    return len((folder.parent / "reads").read_text().splitlines())


@pytest.mark.parametrize("name", ["ram", "cache"])
def test_too_little_room_is_refused_before_anything_is_decoded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pictures(tmp_path / "pictures")
    dataset = Reads(folder, v1.Compose([v1.RandomCrop(9), v1.ToTensor()]))
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=1000))
    monkeypatch.setattr(decoded_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(keep_samples, "load", lambda *parts: pytest.fail("decoded"))
    monkeypatch.setattr(decoded_cache, "_write_headers", lambda *parts: pytest.fail("written"))
    advice = {"ram": r"max_side= .*loader='cache'", "cache": r"folder=.*max_side="}[name]
    with pytest.raises(
        DoesNotFitError, match=rf"^{name}: the .*set takes [\d.]+ MiB .*, where [\d.]+ MiB are free.*{advice}"
    ):
        from_dataloader(DataLoader(dataset, 4), name, folder=str(tmp_path))
    with pytest.warns(UserWarning, match="undecoded: cache: the decoded set takes"):
        from_dataloader(DataLoader(dataset, 4), folder=str(tmp_path))


def test_auto_takes_the_file_if_memory_is_too_small(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=1000))
    replaced = check_same(lambda: DataLoader(Pictures(folder, FLIP), 4, True), loader="auto", folder=str(tmp_path))
    assert replaced.dataset.sample_nbytes
    assert list(tmp_path.iterdir()) == []


class Doubled:
    """Its `repr` has its address, which is another one in each process."""

    def __call__(self, image: Any) -> Any:
        return image.resize((2 * image.width, 2 * image.height))


def cached(folder: Path, cache: Path, **options: Any) -> DataLoader[Any]:
    dataset = Reads(folder, v1.Compose([Doubled(), FLIP]))
    return from_dataloader(DataLoader(dataset, 4, shuffle=True), "cache", folder=str(cache), **options)


def start(target: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target)
    process.start()
    return process


def count_reads(folder: Path, cache: Path) -> None:
    assert_same(
        run(cached(folder, cache, fingerprint="pictures")),
        run(DataLoader(Pictures(folder, v1.Compose([Doubled(), FLIP])), 4, True)),
    )


@pytest.mark.slow
def test_a_second_process_finds_the_files_by_their_fingerprint(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 90)
    counts = []
    for _ in range(2):
        process = start(partial(count_reads, folder, tmp_path / "cache"))
        process.join(100)
        assert process.exitcode == 0
        counts.append(reads(folder))
    assert counts[1] - counts[0] == counts[0] - 90
    assert len(list((tmp_path / "cache").glob("*/images.npy"))) == 1
    other = Pictures(folder, v1.Compose([Doubled(), FLIP]))
    other.paths.reverse()
    with pytest.raises(DataError, match=r"fingerprint= do not fit"):
        from_dataloader(DataLoader(other, 4), "cache", folder=str(tmp_path / "cache"), fingerprint="pictures")


class Slow(Reads):
    def open(self, index: int) -> Any:
        time.sleep(0.01)
        return super().open(index)


def decode_slowly(folder: Path, cache: Path) -> None:
    dataset = Slow(folder, FLIP)
    found = from_dataloader(DataLoader(dataset, 4, num_workers=1), "cache", folder=str(cache), fingerprint="slow")
    assert_same(run(found), run(DataLoader(Pictures(folder, FLIP), 4, num_workers=1)))


@pytest.mark.slow
def test_a_kill_while_decoding_leaves_nothing_that_is_taken_for_complete(tmp_path: Path) -> None:
    folder, cache = write_pictures(tmp_path / "pictures", 90), tmp_path / "cache"
    process = start(partial(decode_slowly, folder, cache))
    for _ in range(6000):
        time.sleep(0.01)
        if any(path.stat().st_size for path in cache.glob(".*.unfinished/images.npy")) or not process.is_alive():
            break
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list(cache.glob("*/cache.json")) == []
    decode_slowly(folder, cache)
    assert len(list(cache.glob("*/cache.json"))) == 1
    assert list(cache.glob(".*.unfinished")) == []


@pytest.mark.slow
def test_two_processes_decode_into_one_folder_once(tmp_path: Path) -> None:
    folder, cache = write_pictures(tmp_path / "pictures", 90), tmp_path / "cache"
    processes = [start(partial(decode_slowly, folder, cache)) for _ in range(2)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(cache.glob("*/cache.json"))) == 1
    decode_slowly(folder, cache)


@pytest.mark.slow
def test_spawned_workers(folder: Path) -> None:
    """One of each: a start takes 10 s on a busy machine."""
    dataset = Pictures(folder, FLIP)
    replaced = from_dataloader(DataLoader(dataset, 4, True, num_workers=1, multiprocessing_context="spawn"), "ram")
    assert_same(run(replaced, 1), run(DataLoader(dataset, 4, True, num_workers=1), 1))


def look_at_dataset(worker: int) -> None:
    dataset = get_worker_info().dataset
    assert dataset.root.is_dir()


def test_the_function_that_starts_a_worker_sees_the_dataset(folder: Path) -> None:
    check_same(lambda: DataLoader(Pictures(folder, FLIP), 4, True, num_workers=1, worker_init_fn=look_at_dataset))


def test_pictures_of_any_kind_that_can_be_kept_stay_as_they_are(tmp_path: Path) -> None:
    for number, mode in enumerate(["RGB", "L", "RGBA", "I;16", "1", "LA", "CMYK"] * 3):
        (tmp_path / "all").mkdir(exist_ok=True)
        image = draw(number, "I;16") if mode == "I;16" else draw(number).convert(mode)
        image.save(tmp_path / "all" / f"{number:02}.{'tif' if mode == 'CMYK' else 'png'}")
    dataset = Pictures(tmp_path, v1.RandomCrop(16), convert=None)
    check_same(lambda: DataLoader(dataset, 4, shuffle=True, collate_fn=list))
