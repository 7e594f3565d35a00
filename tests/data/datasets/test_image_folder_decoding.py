"""A folder of images is decoded on all cores, and an interrupted decoding is resumed from its undamaged parts."""

from __future__ import annotations

import logging
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
from vitmnist.data.tensor_files import TensorWriter
from vitmnist.data.threads import map_in_threads


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A hundred pictures of two classes; the training part is decoded in ten chunks."""
    for number in range(100):
        draw(tmp_path / "pictures" / CLASSES[number % 2] / f"{number}.png", number, size=(4, 4))
    (tmp_path / "pictures" / "cat" / "40.png").write_bytes(b"no picture")
    return tmp_path / "pictures"


def interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> Path:
    """Interrupt the decoding of the training part after some chunks; returns where they are."""
    log = TensorWriter.log

    def log_and_stop(writer: TensorWriter, *parts: object) -> None:
        log(writer, *parts)
        if len(writer) > (after - 1) * image_folder.CHUNK:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TensorWriter, "log", log_and_stop)
        with pytest.raises(KeyboardInterrupt):
            load(folder, skip_unreadable=True)
    (unfinished,) = (folder.parent / "root").glob("*/.*.unfinished")
    return unfinished


def load_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Dataset, int]:
    """The data set, and how many pictures were decoded for its training part."""
    decoded: list[Path] = []
    read = image_folder.read_picture
    with monkeypatch.context() as patched:
        patched.setattr(image_folder, "read_picture", lambda path, *parts: decoded.append(path) or read(path, *parts))
        pets = load(folder, skip_unreadable=True)
    return pets, len(set(decoded) - set(pets.test.open_reader().paths))


def assert_equal(one: Dataset, other: Dataset) -> None:
    assert one.sha256 == other.sha256
    assert (one.train.files, one.test.files, one.skipped) == (other.train.files, other.test.files, other.skipped)


def left_in(folder: Path) -> list[str]:
    """The names of folders and journals of unfinished caches."""
    return [path.name for path in (folder.parent / "root").rglob("*") if path.name.startswith((".", "journal"))]


def test_an_interrupted_decoding_is_resumed(
    many: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(many, monkeypatch, after=2)
    with caplog.at_level(logging.INFO):
        resumed, decoded = load_counted(many, monkeypatch)
    assert decoded == 80 - 2 * image_folder.CHUNK
    assert f"{2 * image_folder.CHUNK} of 80 pictures are decoded already, before an interruption" in caplog.text
    assert left_in(many) == []
    shutil.rmtree(many.parent / "root")
    expected, decoded = load_counted(many, monkeypatch)
    assert decoded == 80
    assert expected.skipped == 1
    assert_equal(resumed, expected)


@pytest.mark.parametrize(
    ("name", "place", "kept"),
    [
        ("images.bin", 0, 0), ("images.bin", 10 * 28 * 28, 1), ("labels.bin", 10 * 8, 1), ("journal.jsonl", 10, 0),
        ("journal.jsonl", -90, 2), ("journal.jsonl", -100, 2),  # in the notes of the last chunk
    ],
)  # fmt: skip
def test_a_damaged_part_is_decoded_again(
    many: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: int, kept: int
) -> None:
    damaged = interrupt(many, monkeypatch, after=3) / name
    content = bytearray(damaged.read_bytes())
    content[place] ^= 0x55
    damaged.write_bytes(content)
    resumed, decoded = load_counted(many, monkeypatch)
    assert decoded == 80 - kept * image_folder.CHUNK
    shutil.rmtree(many.parent / "root")
    assert_equal(resumed, load(many, skip_unreadable=True))


def test_a_part_of_other_contents_is_not_used(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(many, monkeypatch, after=2)
    for number in range(20):
        draw(many / "cat" / f"{2 * number}.png", 999)
    assert load_counted(many, monkeypatch)[1] == 80


def test_a_killed_decoding_is_resumed(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = TensorWriter.append

    def append_or_die(writer: TensorWriter, *parts: object) -> None:
        if len(writer) >= 50:  # after seven chunks
            writer._files["images"].write(b"half a chunk")
            writer.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(writer, *parts)

    def decode() -> None:
        TensorWriter.append = append_or_die
        load(many, skip_unreadable=True)

    killed = fork(decode)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    resumed, decoded = load_counted(many, monkeypatch)
    assert decoded == 80 - 7 * image_folder.CHUNK
    shutil.rmtree(many.parent / "root")
    assert_equal(resumed, load(many, skip_unreadable=True))


def load_on(cores: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The data set; each of as many threads as cores decodes something."""
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
