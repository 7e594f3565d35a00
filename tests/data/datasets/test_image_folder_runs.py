"""Decoding a folder of pictures, on all cores and if it is killed; training on one."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import Printed, Train, result_of
from tests.data.datasets.test_image_folder import CLASSES, draw, folder, load
from vitmnist.cli import evaluate
from vitmnist.data import image_io
from vitmnist.data.datasets import image_folder
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.image_io import read_picture
from vitmnist.runtime import memory
from vitmnist.runtime.memory import Memory

__all__ = ["folder"]  # a fixture


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A hundred pictures of two classes."""
    for number in range(100):
        draw(tmp_path / "pictures" / CLASSES[number % 2] / f"{number}.png", number, size=(4, 4))
    (tmp_path / "pictures" / "cat" / "40.png").write_bytes(b"no picture")
    return tmp_path / "pictures"


@pytest.mark.parametrize("loader", ["gpu_slice", "ram"])
def test_training_and_test_set_must_fit_into_memory_together(
    loader: str, folder: Path, refuse: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets = load(folder)
    monkeypatch.setattr(memory, "free_memory", lambda device: Memory(host=pets.train.nbytes + pets.test.nbytes - 1))
    data = ["data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={folder.parent / 'root'}"]
    printed = refuse(*data, f"data/loader={loader}", "device=cpu")
    assert re.search(rf"{loader}: the set takes .* are free; data/loader=cache or data/loader=disk would work", printed)


def assert_equal(one: Dataset, other: Dataset) -> None:
    assert one.sha256 == other.sha256
    assert (one.train.files, one.test.files, one.skipped) == (other.train.files, other.test.files, other.skipped)


def test_pictures_are_decoded_on_all_cores_in_the_same_order(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(many, skip_unreadable=True)
    shutil.rmtree(many.parent / "root")
    together, seen, before = threading.Barrier(3), set(), {*threading.enumerate()}

    def read(path: Path, *parts: object, **options: object) -> Image.Image:
        name = threading.current_thread().name
        if len(seen) < 3 and name not in seen:  # with its first picture a thread waits for the others
            seen.add(name)
            together.wait(timeout=60)
        return read_picture(path, *parts, **options)

    monkeypatch.setattr(image_folder, "available_cores", lambda: 3)
    monkeypatch.setattr(image_io, "read_picture", read)
    assert_equal(load(many, skip_unreadable=True), expected)
    assert len(seen) == 3
    assert not {*threading.enumerate()} - before


def evaluated(run: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> Any:
    """What `vitmnist evaluate` prints."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate", str(run), *overrides])
        evaluate.main()
    return capsys.readouterr()


def test_training_on_ones_own_pictures(
    folder: Path, train_here: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dog" / "3.png").write_bytes(b"")
    arguments = ("data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={tmp_path / 'root'}")
    ended = train_here(*arguments, "epochs=1", "data.dataset.skip_unreadable=true", "data.dataset.mode=rgb")
    assert ended.returncode == 0, ended.stderr
    assert "evaluated on the test split, 6 images" in ended.stdout
    run = next((tmp_path / "outputs" / "runs").glob("*/*"))
    result = result_of(run)
    assert evaluated(run, capsys).err == ""
    for number in range(10):
        shutil.copy(folder / "dog" / "4.png", folder / "dog" / f"new-{number}.png")
    printed = evaluated(run, capsys, f"data.root={tmp_path / 'root'}")  # they are decoded again, there
    assert "warning: the images of the test split have changed since training" in printed.err
    assert result["dataset"]["skipped"] == 1
    assert result["choices"]["dataset"] == "image_folder"
    refused = train_here(*arguments, "epochs=1")
    assert refused.returncode == 1
    assert "3.png" in refused.stderr
    assert "Traceback" not in refused.stderr
