"""A set is decoded once, by one process, into a file that is whole, found again, and mended."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from filelock import FileLock
from torch.utils.data import Dataset

from vitmnist import make_loader
from vitmnist.data import decoded_cache
from vitmnist.data.decoded_cache import decode_once
from vitmnist.data.loaders.cache import CacheOptions, map_from_cache
from vitmnist.errors import DataError

ORDER = {"batch_size": 4, "device": "cpu", "seed": 0, "shuffle": "none"}


class Counted(Dataset[tuple[torch.Tensor, int]]):
    """Knows how many samples were asked for."""

    asked = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked += 1
        return torch.full((3, 2), index, dtype=torch.uint8), index


def values(samples: Dataset, folder: Path, **options: object) -> list[int]:
    # frozen: without the reads that find out whether samples are random.
    with make_loader("cache", samples, folder=str(folder), frozen=True, **ORDER, **options) as loader:
        return [value for images, labels in loader.epoch(0) for value in (images[:, 0, 0] * 10 + labels).tolist()]


WANTED = [11 * index for index in range(10)]


def test_samples_are_decoded_once(tmp_path: Path) -> None:
    samples = Counted()
    assert values(samples, tmp_path, fingerprint="counted") == WANTED
    assert values(samples, tmp_path, fingerprint="counted") == WANTED
    assert samples.asked == 10
    assert values(samples, tmp_path, fingerprint="other contents") == WANTED
    assert samples.asked == 20


def test_without_a_fingerprint_nothing_is_found_again_and_nothing_is_left(tmp_path: Path) -> None:
    samples = Counted()
    assert values(samples, tmp_path) == values(samples, tmp_path) == WANTED
    assert samples.asked == 20
    assert [path.name for path in tmp_path.iterdir()] == [".now.lock"]


def test_what_a_killed_process_left_for_itself_is_removed(tmp_path: Path) -> None:
    """But not what one that lives is using."""
    for name in (".now.dead", ".now.lives"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with FileLock(tmp_path / ".now.lives" / "lock"):
        values(Counted(), tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".now.lives", ".now.lock"]


def test_a_cache_may_be_larger_than_memory(tmp_path: Path) -> None:
    """A file of holes, which takes no room on the disk."""
    values(Counted(), tmp_path, fingerprint="counted")
    (file,) = tmp_path.glob("*/cache.json")
    record = json.loads(file.read_text())
    size = (psutil.virtual_memory().total + psutil.swap_memory().total) // 10 + 2**27
    record["images"]["shape"] = [10, size]
    file.write_text(json.dumps(record))
    os.truncate(file.parent / "images.bin", 10 * size)
    arrays = map_from_cache(Counted(), CacheOptions(str(tmp_path), "counted", verify=False, frozen=True), ORDER["seed"])
    assert arrays.images.shape == (10, size)
    assert arrays.images[9, -1] == 0


def test_a_fingerprint_of_another_length_is_another_set(tmp_path: Path) -> None:
    values(Counted(), tmp_path, fingerprint="counted")
    assert values(torch.utils.data.Subset(Counted(), range(4, 8)), tmp_path, fingerprint="counted") == WANTED[4:8]


def test_arrays_of_the_same_shape_do_not_share_a_cache(tmp_path: Path) -> None:
    for value in (1, 2):
        pair = torch.full((10, 3), value), torch.arange(10)
        with make_loader("cache", pair, folder=str(tmp_path), **ORDER) as loader:
            assert all(images.eq(value).all() for images, _ in loader.epoch(0))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool, torch.bfloat16, torch.complex64])
def test_any_dtype_is_cached(tmp_path: Path, dtype: torch.dtype) -> None:
    pair = torch.arange(10).view(10, 1).to(dtype), torch.arange(10)
    with make_loader("cache", pair, folder=str(tmp_path), **ORDER) as loader:
        found = torch.cat([images for images, _ in loader.epoch(0)])
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.complex64), pair[0].to(torch.complex64))


def test_samples_of_nothing_are_cached(tmp_path: Path) -> None:
    with make_loader("cache", (torch.zeros(10, 0), torch.arange(10)), folder=str(tmp_path), **ORDER) as loader:
        assert [tuple(images.shape) for images, _ in loader.epoch(0)] == [(4, 0), (4, 0), (2, 0)]


def test_a_batch_is_read_from_the_mapped_file(tmp_path: Path) -> None:
    arrays = map_from_cache(Counted(), CacheOptions(str(tmp_path), "counted", frozen=True), ORDER["seed"])
    (file,) = tmp_path.glob("*/images.bin")
    with file.open("r+b") as opened:
        opened.write(bytes([99]))
    assert arrays.mapped
    assert arrays.images[0, 0, 0] == 99
    arrays.images.zero_()  # a copy of the pages, not the file
    assert file.read_bytes()[0] == 99


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path) -> None:
    """Sizes that fit the file, and a dtype that does not exist."""
    record = json.loads(file.read_text())
    record["images"]["dtype"] = "os.system"
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("images.bin", truncate), ("images.bin", flip), ("images.bin", Path.unlink),
        ("labels.bin", truncate), ("labels.bin", flip), ("labels.bin", Path.unlink),
        ("cache.json", truncate), ("cache.json", forge), ("cache.json", Path.unlink),
    ],
)  # fmt: skip
def test_a_damaged_cache_is_decoded_again_with_a_warning(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = Counted()
    values(samples, tmp_path, fingerprint="counted")
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(place / name)
    with caplog.at_level(logging.WARNING):
        assert values(samples, tmp_path, fingerprint="counted") == WANTED
    assert samples.asked == 20
    assert f"the cache {place} was damaged" in caplog.text
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [place]


def test_without_verify_the_sizes_are_compared(tmp_path: Path) -> None:
    samples = Counted()
    values(samples, tmp_path, fingerprint="counted")
    (file,) = tmp_path.glob("*/images.bin")
    truncate(file)
    assert values(samples, tmp_path, fingerprint="counted", verify=False) == WANTED
    assert samples.asked == 20


def test_a_failure_while_decoding_leaves_nothing(tmp_path: Path) -> None:
    class Fails(Counted):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 7:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="the disk is gone"):  # as it is: it is not the cache that failed
        values(Fails(), tmp_path, fingerprint="counted")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert values(Counted(), tmp_path, fingerprint="counted") == WANTED


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    values(Counted(), tmp_path, fingerprint="counted")
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    left = tmp_path / f".{place.name}.killed"
    place.rename(left)
    values(Counted(), tmp_path, fingerprint="counted")
    assert not left.exists()


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    for fingerprint in (None, "counted"):
        with pytest.raises(DataError, match=rf"cache folder {tmp_path / below} cannot be used.*data\.root=FOLDER"):
            values(Counted(), tmp_path / below, fingerprint=fingerprint)


def test_a_cache_in_a_folder_that_cannot_be_written_any_more_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Counted()
    values(samples, tmp_path, fingerprint="counted")

    def refuse(path: Path) -> None:  # permissions would not stop root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(decoded_cache, "FileLock", refuse)
    assert values(samples, tmp_path, fingerprint="counted") == WANTED
    assert samples.asked == 10


def test_samples_of_different_shapes_are_named(tmp_path: Path) -> None:
    class Ragged(Counted):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(2 + (index == 7)), index

    with pytest.raises(DataError, match="samples 0 to 9 do not make a batch"):
        values(Ragged(), tmp_path)

    def chunks() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.zeros(2, width), torch.zeros(2)) for width in (3, 4)]

    with pytest.raises(DataError, match=r"images 2…: torch.float32 \[4\], but those before are torch.float32 \[3\]"):
        decode_once(tmp_path, "ragged", chunks)


PROCESS = """
import os, sys, time
from pathlib import Path
import torch
from vitmnist.data import decoded_cache
from vitmnist.data.cache import decode_once

def chunks():
    print("decoding", flush=True)
    while len(list(Path(sys.argv[1]).glob("ready*"))) < 3:  # the others have begun, and wait for this one
        time.sleep(0.01)
    time.sleep(0.3)
    for index in range(200):
        yield torch.full((50, 100), index, dtype=torch.uint8), torch.full((50,), index)

(Path(sys.argv[1]) / f"ready{os.getpid()}").touch()
arrays = decode_once(Path(sys.argv[1]), "shared", chunks).arrays
assert torch.equal(arrays.images[:, 0].long(), arrays.labels)
print("whole", len(arrays))
"""


def test_processes_that_start_together_decode_once(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert all(output.endswith("whole 10000\n") for output in outputs)
    assert sum(output.count("decoding") for output in outputs) == 1
