"""A folder of images is decoded on all cores; a decoding that was killed leaves nothing that is used."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from PIL import Image

from tests.data.datasets.test_image_folder import CLASSES, draw, load
from tests.support.processes import fork
from vitmnist.data.datasets import Dataset, image_folder
from vitmnist.data.image_io import read_picture
from vitmnist.data.threads import map_in_threads


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A hundred pictures of two classes."""
    for number in range(100):
        draw(tmp_path / "pictures" / CLASSES[number % 2] / f"{number}.png", number, size=(4, 4))
    (tmp_path / "pictures" / "cat" / "40.png").write_bytes(b"no picture")
    return tmp_path / "pictures"


def assert_equal(one: Dataset, other: Dataset) -> None:
    assert one.sha256 == other.sha256
    assert (one.train.files, one.test.files, one.skipped) == (other.train.files, other.test.files, other.skipped)


def test_a_killed_decoding_starts_again(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_or_die(path: Path, *parts: object) -> Image.Image:
        if path.name == "9.png":
            os.kill(os.getpid(), signal.SIGKILL)
        return read_picture(path, *parts)

    def decode() -> None:
        monkeypatch.setattr(image_folder, "read_picture", read_or_die)
        load(many, skip_unreadable=True)

    killed = fork(decode)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    found = load(many, skip_unreadable=True)
    assert [path.name for path in (many.parent / "root").rglob(".*")] == []
    shutil.rmtree(many.parent / "root")
    assert_equal(found, load(many, skip_unreadable=True))


def load_on(cores: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The dataset; each of as many threads as cores decodes something."""
    together, seen = threading.Barrier(cores), set()

    def read(path: Path, *parts: object) -> Image.Image:
        name = threading.current_thread().name
        if len(seen) < cores and name not in seen:  # with its first picture a thread waits for the others
            seen.add(name)
            together.wait(timeout=60)
        return read_picture(path, *parts)

    monkeypatch.setattr(image_folder, "available_cores", lambda: cores)
    monkeypatch.setattr(image_folder, "read_picture", read)
    pets = load(folder, skip_unreadable=True)
    assert len(seen) == cores
    shutil.rmtree(folder.parent / "root")
    return pets


def test_pictures_are_decoded_on_all_cores_in_the_same_order(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal(load_on(1, many, monkeypatch), load_on(3, many, monkeypatch))
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def test_results_come_in_order_and_a_few_are_computed_ahead() -> None:
    started: list[int] = []
    results = map_in_threads(lambda item: started.append(item) or -item, range(100), threads=2)
    assert [next(results) for _ in range(10)] == [-item for item in range(10)]
    assert len(started) <= 10 + 2 * 2
    results.close()
    assert len(started) <= 10 + 2 * 2

    with pytest.raises(ZeroDivisionError):
        list(map_in_threads(lambda item: 1 // item, [2, 1, 0, 1], threads=2))
