"""A checkpoint is complete or absent. Loading it runs no code, and damage is reported in one line."""

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.conftest import CallHere
from vitmnist.checkpoint import storage
from vitmnist.errors import DataError


def make_state(number: int) -> dict:
    return {"format": storage.FORMAT, "number": number, "weights": torch.full((1000,), float(number))}


def load_number(folder: Path) -> int:
    loaded = storage.read_newest_checkpoint(folder)
    assert torch.equal(loaded["weights"], torch.full((1000,), float(loaded["number"])))
    return loaded["number"]


def test_the_newest_checkpoint_is_loaded_and_the_previous_stays(tmp_path: Path) -> None:
    assert storage.read_newest_checkpoint(tmp_path) is None
    for number in range(4):
        storage.write_checkpoint(tmp_path, make_state(number) | {"is_best": number == 1})
        assert load_number(tmp_path) == number
    checkpoints = tmp_path / "checkpoints"
    assert storage.read_checkpoint_file(checkpoints / "previous.pt")["number"] == 2
    assert storage.read_checkpoint_file(checkpoints / "best.pt")["number"] == 1
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best.pt", "last.pt", "previous.pt"]
    assert torch.load(checkpoints / "last.pt", weights_only=True)["number"] == 3, "torch alone reads it"


def test_weights_that_an_optimizer_only_trains_are_not_read_as_a_model(tmp_path: Path) -> None:
    for progress in (None, {"lrs": []}):
        state = {"step": {"model": {}, "ema": None, "averages_weights": True}, "progress": progress, "model_info": {}}
        storage.write_checkpoint(tmp_path, make_state(0) | state)
        with pytest.raises(DataError, match="has no averaged weights within an epoch") if progress else nullcontext():
            storage.read_weights_file(tmp_path / "checkpoints" / "last.pt")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_checkpoint_is_replaced_by_the_previous(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        storage.write_checkpoint(tmp_path, make_state(number))
    checkpoints = tmp_path / "checkpoints"
    damage(checkpoints / "last.pt")
    assert load_number(tmp_path) == 1
    warnings = [record.getMessage() for record in caplog.records]
    is_missing = damage is Path.unlink
    assert len(warnings) == (not is_missing)
    assert is_missing or "last.pt: is damaged" in warnings[0]
    storage.write_checkpoint(tmp_path, make_state(3))
    assert load_number(tmp_path) == 3
    assert storage.read_checkpoint_file(checkpoints / "previous.pt")["number"] == 1, "not the damaged one"
    damage(checkpoints / "last.pt")
    (checkpoints / "previous.pt").unlink(missing_ok=True)
    if is_missing:
        assert storage.read_newest_checkpoint(tmp_path) is None
    else:
        with pytest.raises(storage.DamagedError, match=r"last\.pt: is damaged.*; remove it to begin"):
            storage.read_newest_checkpoint(tmp_path)


class Killed(BaseException):
    """Simulates SIGKILL: no handler of `Exception` catches it."""


def test_a_save_killed_anywhere_leaves_a_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        storage.write_checkpoint(folder, make_state(0) | {"is_best": True})
        storage.write_checkpoint(folder, make_state(1))
        calls = itertools.count(1)

        def dying(original: Callable[..., object]) -> Callable[..., object]:
            def die_or_call(*arguments: object, **options: object) -> object:
                if next(calls) == call:  # noqa: B023
                    raise Killed
                return original(*arguments, **options)

            return die_or_call

        with monkeypatch.context() as patched:
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
                patched.setattr(owner, name, dying(getattr(owner, name)))
            try:
                storage.write_checkpoint(folder, make_state(2) | {"is_best": True})
                break
            except Killed:
                pass
        assert load_number(folder) in (1, 2), call
        assert storage.read_checkpoint_file(folder / "checkpoints" / "best.pt")["number"] in (0, 2), call
        storage.write_checkpoint(folder, make_state(3))
        assert load_number(folder) == 3
    assert call > 5


def test_a_pickle_is_refused_before_it_runs(tmp_path: Path) -> None:
    """The checksum is correct, so only `weights_only` protects."""

    class Hostile:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "was run"),)

    storage.write_checkpoint(tmp_path, {"model": Hostile()})
    with pytest.raises(DataError, match="its content is not only plain values and tensors") as refused:
        storage.read_newest_checkpoint(tmp_path)
    assert "weights_only" not in str(refused.value), "torch advises to load it anyway"
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    ("name", "options", "content"),
    [("last.pt", ["--weights=last"], b"[1, 2]"), ("final.safetensors", [], b"[1, 2]"), ("final.safetensors", [], None)],
    ids=["no checkpoint", "no weights", "truncated"],
)
def test_a_damaged_record_is_named_in_one_line(
    name: str, options: list[str], content: bytes | None, runs: Path, call_here: CallHere, tmp_path: Path
) -> None:
    folder = shutil.copytree(runs / "whole", tmp_path / "run")
    damaged = folder / "checkpoints" / name
    damaged.write_bytes(content or damaged.read_bytes()[:5000])
    ended = call_here("evaluate", ".", *options, folder=folder)
    assert "Traceback" not in ended.stdout + ended.stderr
    (named,) = (line for line in (ended.stdout + ended.stderr).splitlines() if name in line)
    assert ended.stderr.startswith("error: ")
    assert "is damaged" in named
