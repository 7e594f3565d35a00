"""A folder is locked before anything is written into it, whatever its name, and no process removes one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Printed, Start, Train, result_of
from vitmnist.errors import ExitCode
from vitmnist.runtime.file_lock import is_locked
from vitmnist.runtime.run_folder import LOCK_NAME, InUseError, lock_folder


def test_a_folder_with_blanks_is_resumed_as_it_is_shown(quick: list[str], succeed: Printed, tmp_path: Path) -> None:
    """Hydra wants such a name in quotes; the program prints it without them."""
    printed = succeed(*quick, "epochs=1", "hydra.run.dir='it is, a=b'")
    assert "Results: it is, a=b" in printed
    succeed("resume=it is, a=b", "epochs=2")
    assert len(result_of(tmp_path / "it is, a=b")["epochs"]) == 2


def test_a_lock_is_seen_by_another_process_and_not_lost_by_looking(tmp_path: Path) -> None:
    look = "import pathlib, vitmnist.runtime.file_lock as file_lock; print(file_lock.is_locked(pathlib.Path('.lock')))"

    def seen() -> str:
        return subprocess.check_output([sys.executable, "-c", look], text=True, cwd=tmp_path)

    with lock_folder(tmp_path):
        assert not is_locked(tmp_path / LOCK_NAME)
        with pytest.raises(InUseError, match="in use by another run"), lock_folder(tmp_path):
            pass
        assert seen() == "True\n"
    assert seen() == "False\n"


def test_an_active_run_is_left_alone(
    quick: list[str], refuse: Printed, train_here: Train, start: Start, tmp_path: Path
) -> None:
    """Also one that was killed before and resumed, which has looked for a result that is not there."""

    def is_refused_for_now(*typed: str) -> bool:  # with the exit code for which a requeue loop tries again
        ended = train_here(*typed)
        return ended.returncode == ExitCode.UNFINISHED and "error: here: in use by another run" in ended.stderr

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
    assert is_locked(tmp_path / "here" / LOCK_NAME)


def test_a_job_whose_folder_is_in_use_is_left_unfinished(quick: list[str], start: Start, tmp_path: Path) -> None:
    with lock_folder(tmp_path / "swept" / "0"):
        numbered = ["hydra.sweep.dir=swept", "hydra.sweep.subdir=${hydra.job.num}"]
        code, output = start(*quick, "-m", "seed=1,2", *numbered).ended()
    assert code == ExitCode.UNFINISHED
    assert "job 0 failed: swept/0: in use by another run" in output
    assert "Traceback" not in output
    assert result_of(tmp_path / "swept" / "1")["status"] == "completed"
