"""A folder is locked before anything is written into it, whatever its name, and no process removes one."""

from __future__ import annotations

import errno
import fcntl
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import Printed, Start, Train, assert_same_run, result_of
from vitmnist.errors import ExitCode
from vitmnist.runtime.run_folder import InUseError, is_in_use, locked

NAMES = ("it's, a=b", 'say "so" größe, back\\slash [x] {a:1} $HOME\\')


def test_a_folder_of_any_name_is_started_and_resumed(quick: list[str], succeed: Printed, tmp_path: Path) -> None:
    for name in NAMES:
        succeed(*quick, "epochs=1", f"hydra.run.dir={name}")
        succeed(f"resume={name}", "epochs=2")
        assert len(result_of(tmp_path / name)["epochs"]) == 2
        assert "resuming" in succeed("resume=auto", f"hydra.run.dir={name}", "epochs=3")
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES}


def test_the_checkpoints_may_be_kept_on_another_disk(
    runs: Path, stateful: list[str], train_here: Train, succeed: Printed, tmp_path: Path
) -> None:
    """By a link to it, as on clusters where home folders are small."""
    for folder in ("run", "scratch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    again = [*stateful, "hydra.run.dir=run", "resume=auto"]
    assert train_here(*again, "max_minutes=0").returncode == ExitCode.UNFINISHED
    assert "resumed after" in succeed(*again, "max_minutes=null")
    assert_same_run(runs / "whole", tmp_path / "run")
    assert {path.name for path in (tmp_path / "scratch").iterdir()} >= {"last.pt", "final.safetensors"}


def test_names_that_a_terminal_or_hydra_would_obey_are_refused(
    quick: list[str], refuse: Printed, tmp_path: Path
) -> None:
    for name in ("a\nb", "\x1b[31mred", "\x9bx"):
        printed = refuse(*quick, f"hydra.run.dir={name}")
        assert "must not contain control characters or ${; name another folder with hydra.run.dir=" in printed
        assert printed.rstrip("\n").isprintable()
    assert not list(tmp_path.iterdir())
    (tmp_path / "${now:%Y}").mkdir()
    assert "must not contain control characters or ${" in refuse(*quick, folder=tmp_path / "${now:%Y}")
    assert not list((tmp_path / "${now:%Y}").iterdir())


def test_auto_in_a_folder_named_by_a_key_is_typed_again_and_again(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    typed = [*quick, "resume=auto", "hydra.run.dir=runs/${seed}"]
    assert "nothing to resume in runs/42; a new run begins" in train_here(*typed, "max_minutes=0").stdout
    assert "resume=auto: resuming runs/42" in train_here(*typed, "max_minutes=null").stdout
    assert "runs/42: completed, epoch 2/2" in train_here(*typed).stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["42"]


def test_of_two_simultaneous_starts_one_trains_and_the_other_is_refused(
    quick: list[str], start: Start, succeed: Printed, tmp_path: Path
) -> None:
    succeed(*quick, "hydra.run.dir=alone")
    draw = random.Random(0)
    for number in range(3):
        pair = []
        for side in range(2):
            typed = ["resume=auto"] if (number + side * number // 2) % 2 else []
            pair.append(start(*quick, f"hydra.run.dir=pair{number}", *typed, output=f"{number}-{side}.log"))
            time.sleep(0.02 * draw.random())
        ended = [process.ended() for process in pair]
        folder = tmp_path / f"pair{number}"
        assert result_of(folder)["status"] == "completed", ended
        assert_same_run(tmp_path / "alone", folder)
        refused = [output for code, output in ended if code]
        assert len(refused) <= 1
        assert all("in use by another process" in output or "holds records" in output for output in refused)


def test_a_lock_is_seen_by_another_process_and_not_lost_by_looking(tmp_path: Path) -> None:
    look = "import pathlib, vitmnist.runtime.run_folder as run_folder; print(run_folder.is_in_use(pathlib.Path()))"

    def seen() -> str:
        return subprocess.check_output([sys.executable, "-c", look], text=True, cwd=tmp_path)

    with locked(tmp_path):
        assert not is_in_use(tmp_path)
        with pytest.raises(InUseError, match="in use by this process"), locked(tmp_path):
            pass
        for _ in range(2):
            assert seen() == "True\n"
    assert seen() == "False\n"


def test_a_start_removes_what_writes_that_were_killed_have_left_in_its_folder(
    quick: list[str], succeed: Printed, tmp_path: Path
) -> None:
    left = [".epochs.csv.0123abcd", ".hydra/.config.yaml.89abcdef", "checkpoints/.final.safetensors.0a1b2c3d"]
    for path in (tmp_path / folder / file for folder in ("here", "there") for file in left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half of it")
    succeed(*quick, "epochs=1", "hydra.run.dir=here")
    assert [(tmp_path / "here" / file).exists() for file in left] == [False] * 3
    assert [(tmp_path / "there" / file).exists() for file in left] == [True] * 3


def test_a_file_system_without_locks_is_used_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'new'}: this file system has no locks; start only one run at a time in this folder"
    ]
    assert not is_in_use(tmp_path / "new")
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"), locked(tmp_path / "new"):
        pass


def test_a_run_under_way_is_left_alone(
    quick: list[str], refuse: Printed, train_here: Train, start: Start, tmp_path: Path
) -> None:
    """Also one that was killed before and resumed, which has looked for a result that is not there."""

    def is_refused_for_now(*typed: str) -> bool:  # with the exit code for which a requeue loop tries again
        ended = train_here(*typed)
        return ended.returncode == ExitCode.UNFINISHED and "error: here: in use by another process" in ended.stderr

    running = start(*quick, "epochs=100000", "hydra.run.dir=here").until("epoch 2/")
    assert is_refused_for_now(*quick, "hydra.run.dir=here")
    refuse(*quick, "hydra.run.dir=here", "batch_size=0")
    running.ended(signal.SIGKILL)
    running = start("resume=here").until("epoch ")
    again = [*quick, "epochs=100000", "resume=auto", "hydra.run.dir=here"]
    assert is_refused_for_now("resume=here")
    assert is_refused_for_now(*again)
    refuse(*again, "batch_size=0")
    assert running.is_alive()
    assert is_in_use(tmp_path / "here")


def test_a_job_whose_folder_is_in_use_is_left_unfinished_and_the_sweep_goes_on(
    quick: list[str], start: Start, tmp_path: Path
) -> None:
    with locked(tmp_path / "swept" / "0"):
        numbered = ["hydra.sweep.dir=swept", "hydra.sweep.subdir=${hydra.job.num}"]
        code, output = start(*quick, "-m", "seed=1,2", *numbered).ended()
    assert code == ExitCode.UNFINISHED
    assert "job 0 failed: swept/0: in use by another process" in output
    assert "Traceback" not in output
    assert result_of(tmp_path / "swept" / "1")["status"] == "completed"
