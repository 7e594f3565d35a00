"""A checkpoint is whole or not there, and nothing in it is run."""

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

from vitmnist.checkpoint import storage as checkpoint
from vitmnist.errors import DataError


def state(number: int) -> dict:
    return {"number": number, "weights": torch.full((1000,), float(number))}


def numbers(folder: Path) -> int:
    kept = checkpoint.load(folder)
    assert torch.equal(kept["weights"], torch.full((1000,), float(kept["number"])))
    return kept["number"]


def test_the_newest_is_loaded_and_the_one_before_it_kept(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    for number in range(4):
        checkpoint.save(tmp_path, state(number), best=number == 1)
        assert numbers(tmp_path) == number
    place = tmp_path / "checkpoints"
    assert checkpoint.read(place / "previous.pt")["number"] == 2
    assert checkpoint.read(place / "best.pt")["number"] == 1
    for path in place.glob("*.pt"):
        digest, _, name = (place / f"{path.name}.sha256").read_text().strip().partition("  ")
        assert path.name in (name, "previous.pt")
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(path.name for path in place.iterdir()) == [
        "best.pt", "best.pt.sha256", "last.pt", "last.pt.sha256", "previous.pt", "previous.pt.sha256",
    ]  # fmt: skip


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
        checkpoint.save(tmp_path, state(number))
    last = tmp_path / "checkpoints" / "last.pt"
    damage(last)
    assert numbers(tmp_path) == 1
    assert not last.exists()  # put aside, so that the next save does not take it for the one before
    if damage is not Path.unlink:
        assert f"{last}: is damaged, it does not match its checksum; the one before it is used" in caplog.text
    damage(tmp_path / "checkpoints" / "previous.pt")
    if damage is Path.unlink:
        assert checkpoint.load(tmp_path) is None
    else:
        with pytest.raises(DataError, match="no checkpoint is whole"):
            checkpoint.load(tmp_path)


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
def test_killed_at_any_moment_of_a_save_a_whole_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        checkpoint.save(folder, state(0), best=True)
        checkpoint.save(folder, state(1))
        dying = Dying(call, before)
        with monkeypatch.context() as patched:
            for name in ("fsync", "replace", "unlink"):
                patched.setattr(os, name, dying.watched(getattr(os, name)))
            try:
                checkpoint.save(folder, state(2), best=True)
                break
            except Killed:
                pass
        assert numbers(folder) in (1, 2), call
        assert checkpoint.read(folder / "checkpoints" / "best.pt")["number"] in (0, 2), call
        checkpoint.save(folder, state(3))
        assert numbers(folder) == 3
    assert call > 10


def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, state(0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write the checkpoint .*\.pt.*: No space left on device; .* is kept"):
        checkpoint.save(tmp_path, state(1))
    monkeypatch.undo()
    assert numbers(tmp_path) == 0


def test_a_pickle_is_refused_before_it_runs(tmp_path: Path) -> None:
    """Also with the right checksum beside it."""

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
        (place / "last.pt").write_bytes(payload)
        (place / "last.pt.sha256").write_text(f"{hashlib.sha256(payload).hexdigest()}  last.pt\n")
        with pytest.raises(DataError, match="no checkpoint is whole"):
            checkpoint.load(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw() -> list:
        return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)]

    draw()
    checkpoint.save(tmp_path, {"random": checkpoint.random_state()})
    wanted = draw()
    draw()
    checkpoint.set_random_state(checkpoint.load(tmp_path)["random"])
    assert draw() == wanted
