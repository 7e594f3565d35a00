"""A checkpoint is complete or not there, and loading one runs no code of it."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vitmnist.checkpoint import rng, storage
from vitmnist.errors import DataError


def state(number: int) -> dict:
    return {"number": number, "weights": torch.full((1000,), float(number))}


def numbers(folder: Path) -> int:
    loaded = storage.load(folder)
    assert torch.equal(loaded["weights"], torch.full((1000,), float(loaded["number"])))
    return loaded["number"]


def test_the_newest_is_loaded_and_the_one_before_it_kept(tmp_path: Path) -> None:
    assert storage.load(tmp_path) is None
    for number in range(4):
        storage.save(tmp_path, state(number), best=number == 1)
        assert numbers(tmp_path) == number
    place = tmp_path / "checkpoints"
    assert storage.read(place / "previous.pt")["number"] == 2
    assert storage.read(place / "best.pt")["number"] == 1
    assert sorted(path.name for path in place.iterdir()) == ["best.pt", "last.pt", "previous.pt"]
    assert torch.load(place / "last.pt", weights_only=True)["number"] == 3  # also without this program


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_one_gives_way_to_the_one_before_it(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        storage.save(tmp_path, state(number))
    place = tmp_path / "checkpoints"
    damage(place / "last.pt")
    before = {path: path.read_bytes() for path in place.iterdir()}
    assert numbers(tmp_path) == 1
    assert {path: path.read_bytes() for path in place.iterdir()} == before
    warnings = [record.getMessage() for record in caplog.records]
    is_missing = damage is Path.unlink
    assert len(warnings) == (not is_missing)
    assert is_missing or "last.pt: is damaged" in warnings[0]
    storage.save(tmp_path, state(3))
    assert storage.read(place / "previous.pt")["number"] == 1, "a damaged one does not become the previous one"
    for name in ("last.pt", "previous.pt"):
        damage(place / name)
    if is_missing:
        assert storage.load(tmp_path) is None
    else:
        with pytest.raises(storage.DamagedError, match="all checkpoints are damaged"):
            storage.load(tmp_path)


class Killed(BaseException):
    """As sudden as a signal."""


class Dying:
    """Counts the system calls of a save, and ends it before or after one of them."""

    def __init__(self, call: int, before: bool) -> None:
        self.call, self.before, self.calls = call, before, 0

    def watched(self, original: Callable[..., object]) -> Callable[..., object]:
        def system_call(*arguments: object, **options: object) -> object:
            self.calls += 1
            if self.before and self.calls == self.call:
                raise Killed
            result = original(*arguments, **options)
            if self.calls == self.call:
                raise Killed
            return result

        return system_call


@pytest.mark.parametrize("before", [True, False])
def test_a_save_killed_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        storage.save(folder, state(0), best=True)
        storage.save(folder, state(1))
        dying = Dying(call, before)
        with monkeypatch.context() as patched:
            for name in ("fsync", "replace", "unlink"):
                patched.setattr(os, name, dying.watched(getattr(os, name)))
            try:
                storage.save(folder, state(2), best=True)
                break
            except Killed:
                pass
        assert numbers(folder) in (1, 2), call
        assert storage.read(folder / "checkpoints" / "best.pt")["number"] in (0, 2), call
        storage.save(folder, state(3))
        assert numbers(folder) == 3
    assert call > 5


def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.save(tmp_path, state(0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError,
        match=r"cannot write the checkpoint .*\.pt.*: No space left on device; the previous checkpoint is kept",
    ):
        storage.save(tmp_path, state(1))
    monkeypatch.undo()
    assert numbers(tmp_path) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.pt"]


def test_a_pickle_is_refused_before_it_runs(tmp_path: Path) -> None:
    """Also with the right checksum."""

    class Hostile:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "was run"),)

    payloads = [pickle.dumps(Hostile(), protocol=2)]
    buffer = io.BytesIO()
    torch.save({"format": 1, "model": Hostile()}, buffer)
    payloads.append(buffer.getvalue())
    payloads.append(pickle.dumps([1, 2, 3], protocol=2))
    payloads.append(b"")
    for payload in payloads:
        place = tmp_path / "checkpoints"
        place.mkdir(exist_ok=True)
        (place / "last.pt").write_bytes(payload + hashlib.sha256(payload).digest())
        with pytest.raises(DataError, match="all checkpoints are damaged"):
            storage.load(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_every_generator_is_restored(tmp_path: Path) -> None:
    def draw() -> list:
        return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)]

    draw()
    storage.save(tmp_path, rng.rng_state(torch.device("cpu")))
    expected = draw()
    draw()
    saved = storage.load(tmp_path)
    rng.set_rng_state(saved, torch.device("cpu"))
    assert draw() == expected


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    for number in (4, 99):
        storage.save(tmp_path, {"format": number, "model": {}})
        with pytest.raises(DataError, match=rf"last\.pt: .* format {number}; this version has {storage.FORMAT}"):
            storage.load(tmp_path)


def test_damage_anywhere_in_a_file_is_found_and_the_previous_checkpoint_used(tmp_path: Path) -> None:
    """Also where it leads torch's unpickler to errors of any type."""
    storage.save(tmp_path, state(0))
    storage.save(tmp_path, state(1))
    last = tmp_path / "checkpoints" / "last.pt"
    content = last.read_bytes()
    for offset in range(0, len(content), 61):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        last.write_bytes(damaged)
        assert numbers(tmp_path) == 0, offset


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_damage_and_does_not_block(
    make: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage.save(tmp_path, state(0))
    storage.save(tmp_path, state(1))
    last = tmp_path / "checkpoints" / "last.pt"
    kept = (tmp_path / "checkpoints" / "previous.pt").read_bytes()
    last.unlink()
    make(last)
    found = storage.load(tmp_path)
    assert found is not None
    assert found["number"] == 0
    assert "last.pt: is not a regular file; previous.pt is used" in caplog.text
    assert (tmp_path / "checkpoints" / "previous.pt").read_bytes() == kept


def test_the_first_checkpoint_that_fails_does_not_promise_another(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(DataError, match=r"cannot write the checkpoint \S+: \w[\w ]+$"):
        storage.save(tmp_path, state(0))
