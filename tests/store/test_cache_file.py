"""A set is decoded once, by one process, into files that are complete, found again, and repaired."""

import errno
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from tests.support.processes import call_in_process
from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.data import sources
from vitmnist.data.sources import DatasetSource
from vitmnist.errors import DataError
from vitmnist.runtime.memory import OutOfSpaceError
from vitmnist.runtime.run_folder import InUseError, lock_folder
from vitmnist.store import cache_file
from vitmnist.store.rows import StoreOptions

ORDER = {"batch_size": 4, "device": "cpu", "seed": 0, "shuffle": "none"}
EXPECTED = [11 * index for index in range(10)]


@pytest.fixture(autouse=True)
def _not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the reads that detect random samples."""
    monkeypatch.setattr(sources, "read_probes", lambda *parts: ([], None))


def sample(index: int) -> tuple[Tensor, int]:
    return torch.full((3, 2), index, dtype=torch.uint8), index


def counted(make: Callable[[int], Any] = sample) -> Made:
    return Made(make, 10)


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def values(samples: Made, folder: Path, fingerprint: str | None = None) -> list[int]:
    stored = DatasetSource(samples).store_all(StoreOptions(folder, fingerprint))
    return (stored.images[:, 0, 0] * 10 + stored.labels).tolist()


def test_samples_are_decoded_once_per_fingerprint(tmp_path: Path) -> None:
    samples = counted()
    for _ in range(2):
        assert values(samples, tmp_path, fingerprint="counted") == EXPECTED
    assert len(samples.reads) == 10
    assert values(samples, tmp_path, fingerprint="other contents") == EXPECTED
    assert len(samples.reads) == 20
    # Other processes find it: its name is a function of its contents.
    key = hashlib.sha256(b"counted").hexdigest()[:24]
    assert (tmp_path / key / "cache.json").exists()


def test_without_a_fingerprint_nothing_is_found_again_and_nothing_is_left(tmp_path: Path) -> None:
    samples = counted()
    assert values(samples, tmp_path) == values(samples, tmp_path) == EXPECTED
    assert len(samples.reads) == 20
    assert list(tmp_path.iterdir()) == []

    def cache_and_die() -> None:
        with make_loader("cache", counted(), folder=str(tmp_path), **ORDER):
            os.kill(os.getpid(), signal.SIGKILL)

    process = call_in_process(cache_and_die)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("POSIX files")
def test_a_cache_may_be_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is sparse, so it takes no room on the disk."""
    values(counted(), tmp_path, fingerprint="counted")
    (path,) = tmp_path.glob("*/images.npy")
    size = (psutil.virtual_memory().total + psutil.swap_memory().total) // 10 + 2**27
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10, size)})
        file.truncate(file.tell() + 10 * size)
    written = json.loads(path.with_name("cache.json").read_text())["crc32"]
    monkeypatch.setattr(cache_file, "_checksum", lambda *parts: written)
    tensors = DatasetSource(counted()).store_all(StoreOptions(tmp_path, "counted"))
    assert tensors.images.shape == (10, size)
    assert tensors.images[9, -1] == 0


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool, torch.complex64])
def test_tensors_of_any_dtype_are_cached_by_their_content(tmp_path: Path, dtype: torch.dtype) -> None:
    for images in (torch.arange(10).view(10, 1), torch.ones(10, 1), torch.zeros(10, 0)):
        pair = images.to(dtype), torch.arange(10)
        with make_loader("cache", pair, folder=str(tmp_path), **ORDER) as loader:
            found = torch.cat([images for images, _ in loader.epoch(0)])
        assert found.dtype == dtype
        assert torch.equal(found.to(torch.complex64), pair[0].to(torch.complex64))


def test_batches_are_read_from_a_mapped_file_that_numpy_reads_too(tmp_path: Path) -> None:
    tensors = DatasetSource(counted()).store_all(StoreOptions(tmp_path, "counted"))
    (path,) = tmp_path.glob("*/images.npy")
    stored = np.load(path, mmap_mode="r+")
    assert np.array_equal(stored, tensors.images.numpy())
    assert np.load(path.with_name("labels.npy")).tolist() == list(range(10))
    stored[0] = 99
    assert tensors.images[0, 0, 0] == 99
    tensors.images.zero_()  # a copy of the pages, not the file
    assert stored[0, 0, 0] == 99


def test_a_dataset_larger_than_the_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10 * (3 * 2 + 8) - 1
    monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(cache_file, "_write_headers", lambda *parts: pytest.fail("written"))
    message = rf"takes .* MiB on the disk of {tmp_path}, where .* data\.root=FOLDER.* data\.dataset\.size"
    for fingerprint in (None, "counted"):
        with pytest.raises(OutOfSpaceError, match=message):
            values(counted(), tmp_path, fingerprint=fingerprint)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    with make_loader("auto", counted(), candidates=["ram"], batches=1, **ORDER) as loader:
        assert type(loader).__name__ == "RamLoader"


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def change_metadata(file: Path) -> None:
    file.write_text(
        file.read_text(encoding="utf-8").replace('"metadata": {}', '"metadata": {"mean": 0.9}'), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("images.npy", truncate),
        ("labels.npy", Path.unlink),
        ("cache.json", truncate),
        ("cache.json", change_metadata),
        ("cache.json", lambda file: file.write_text("[" * 100_000, encoding="utf-8")),
        ("labels.npy", flip_last_byte),
    ],
)
def test_a_damaged_cache_is_decoded_again_with_a_warning(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = counted()
    values(samples, tmp_path, fingerprint="counted")
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(place / name)
    with caplog.at_level(logging.WARNING):
        assert values(samples, tmp_path, fingerprint="counted") == EXPECTED
    assert len(samples.reads) == 20
    assert f"the cache {place} cannot be used" in caplog.text
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [place]


def test_an_interrupted_decoding_leaves_nothing(tmp_path: Path) -> None:
    def fail(index: int) -> Any:
        if index == 7:
            raise OSError("the disk is gone")
        return sample(index)

    with pytest.raises(OSError, match="the disk is gone"):  # not an error of the cache
        values(counted(fail), tmp_path, fingerprint="counted")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert values(counted(), tmp_path, fingerprint="counted") == EXPECTED
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    killed = tmp_path / f".{place.name}.unfinished"  # a process that is killed while it writes leaves this
    place.rename(killed)
    assert values(counted(), tmp_path, fingerprint="counted") == EXPECTED
    assert not killed.exists()


@pytest.mark.parametrize("fingerprint", [None, "counted"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, fingerprint: str | None) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=rf"cache folder {tmp_path / 'file'} cannot be used.*data\.root=FOLDER"):
        values(counted(), tmp_path / "file", fingerprint=fingerprint)


def test_a_cache_in_a_read_only_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = counted()
    values(samples, tmp_path, fingerprint="counted")

    def refuse(path: Path) -> None:  # permissions would not stop root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache_file, "wait_for_lock", refuse)
    assert values(samples, tmp_path, fingerprint="counted") == EXPECTED
    assert len(samples.reads) == 10


@pytest.mark.needs("POSIX files")
def test_where_the_file_system_has_no_locks_caches_and_run_folders_only_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*parts: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    samples = counted()
    for _ in range(2):
        assert values(samples, tmp_path / "cache", fingerprint="counted") == EXPECTED
    assert len(samples.reads) == 10
    with lock_folder(tmp_path / "run"), pytest.raises(InUseError), lock_folder(tmp_path / "run"):
        pass
    warned = [record.args for record in caplog.records if "this file system has no locks" in record.message]
    assert warned == [(tmp_path / "cache",), (tmp_path / "run",)]


def test_samples_of_different_shapes_are_named(tmp_path: Path) -> None:
    ragged = Made(lambda index: (torch.zeros(2 + (index // 256)), index), 300)
    with pytest.raises(DataError, match=r"256 on are torch.float32 \[3\] and .*, those before torch.float32 \[2\]"):
        make_loader("cache", ragged, folder=str(tmp_path), **ORDER)


def test_processes_that_start_together_decode_once(tmp_path: Path) -> None:
    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        (tmp_path / f"decoding{os.getpid()}").touch()
        while len(list(tmp_path.glob("ready*"))) < 3:  # the others have started, and wait for this one
            time.sleep(0.01)
        time.sleep(0.3)
        for index in range(200):
            yield torch.full((50, 100), index, dtype=torch.uint8), torch.full((50,), index)

    def decode() -> None:
        (tmp_path / f"ready{os.getpid()}").touch()
        images, labels = cache_file.open_or_write_cache(tmp_path, "shared", 10_000, chunks)[0]
        assert len(images) == 10_000
        assert torch.equal(images[:, 0].long(), labels)

    processes = [call_in_process(decode) for _ in range(3)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("decoding*"))) == 1


def test_threads_that_start_together_decode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    decoded: list[int] = []

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        decoded.append(1)
        time.sleep(0.2)
        yield torch.zeros(5, 3), torch.arange(5)

    with ThreadPoolExecutor(3) as threads:
        folders = (tmp_path, Path(), tmp_path)
        tensors = [threads.submit(cache_file.open_or_write_cache, folder, "shared", 5, chunks) for folder in folders]
    assert all(torch.equal(future.result()[0][1], torch.arange(5)) for future in tensors)
    assert len(decoded) == 1
