"""A run names the file that it cannot write, and saves everything that it still can."""

import errno
import itertools
import os
import re
import sys
from functools import partial
from pathlib import Path

from tests.conftest import STATEFUL, Start, assert_same_run, overrides_for, result_of
from tests.support.processes import TrainProcess
from vitmnist.checkpoint import storage

EVERY = 37
"""The disk becomes full at call 0, 37, 74, … An odd interval hits both the opening and the flushing of files."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def fill_disk(run: Path, calls: int) -> None:
    """Let opening files, creating folders and flushing fail in a folder from call `calls` on, as on a full disk."""
    call, fsync = itertools.count(), os.fsync

    def write(path: object) -> None:
        if next(call) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def hook(event: str, arguments: tuple) -> None:
        is_write = event == "os.mkdir" or (
            event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & WRITING
        )
        if is_write and Path(os.path.abspath(os.fsdecode(arguments[0]))).is_relative_to(run):
            write(arguments[0])

    def flush(descriptor: int) -> None:
        write(None)
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = flush


def test_a_run_survives_a_disk_full_at_any_call(tiny_root: Path, tmp_path: Path) -> None:
    settings = ["batch_size=12", "checkpoint.every_minutes=1e-9", "resume=auto", "hydra.run.dir=run"]
    arguments = overrides_for(tiny_root, *STATEFUL, *settings)
    assert TrainProcess(tmp_path, *arguments).ended()[0] == 0
    for calls in itertools.count(0, EVERY):
        folder = tmp_path / str(calls)
        folder.mkdir()
        full = TrainProcess(folder, *arguments, before=partial(fill_disk, folder / "run", calls))
        code, output = full.ended()
        assert code == (0 if "Results: run" in output else 1), output
        assert code == 0 or ("No space left on device" in output and "Traceback" not in output), output
        if code:
            resumed, output = TrainProcess(folder, *arguments).ended()
            assert resumed == 0, f"{calls}: {output}"
        assert_same_run(tmp_path / "run", folder / "run")
        if code == 0:
            break
    assert calls >= 2 * EVERY


def test_an_unwritable_record_is_named_after_a_save(tiny_root: Path, start: Start, tmp_path: Path) -> None:
    settings = ["epochs=100000", "checkpoint.min_interval_s=null", "hydra.run.dir=run"]
    run = tmp_path / "run"
    started = start(*overrides_for(tiny_root, *settings)).until("epoch 2/100000")
    assert not (run / "checkpoints").exists()
    (failing,) = run.glob("events.out.tfevents.*")
    (tmp_path / "taken").mkdir()
    failing.rename(tmp_path / "moved")
    (tmp_path / "taken").rename(failing)
    code, output = started.ended()
    assert code == 1
    message = rf"error: cannot write the records: \S*run/{failing.name}: Is a directory$"
    assert re.search(message, output, re.MULTILINE), output
    assert "Traceback" not in output
    result, checkpoint = result_of(run), storage.read_newest_checkpoint(run)
    assert result["status"] == "failed"
    assert result["error"] in output
    assert checkpoint is not None
    assert checkpoint["epochs"] == result["epochs"]
