"""Sweeps whose jobs run elsewhere, by the launchers that exist for Hydra: the same answer, and times are marked."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import PLAIN, Train, overrides_for, result_of
from tests.support.outputs import rows
from tests.support.pages import commands
from tests.support.processes import REPOSITORY, run_python, start_program
from vitmnist.errors import ExitCode
from vitmnist.tracking.runs import read_run

DOCUMENTED = [command for command in commands("python train.py") if "hydra/launcher=parallel" in command]
LAUNCHERS = [("joblib", *DOCUMENTED), ("submitit", ["-m", "hydra/launcher=submitit", "seed=1,2"])]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plugin", "typed"), LAUNCHERS)
def test_two_jobs_at_once_end_in_one_report(plugin: str, typed: list[str], tiny_root: Path, tmp_path: Path) -> None:
    """A job that is refused in a process of its own fails the sweep, which reports what the others completed."""
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
    data = ["data/dataset=kmnist", f"data.root={tiny_root}", "batch_size=12", "model=cnn", "epochs=80", PLAIN]
    *typed, seeds = typed
    ended = start_program(tmp_path, *typed, f"{seeds},-1", *data, "hydra.sweep.dir=here")
    assert ended.returncode == 1, ended.stdout
    assert "error: 1 of 3 jobs failed: 2-seed_-1\n" in ended.stderr
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[01]-*"))]
    assert [(result["status"], result["config"]["seed"], len(result["epochs"])) for result in results] == [
        ("completed", 1, 80),
        ("completed", 2, 80),
    ]
    assert [row["status"][:25] for row in rows(tmp_path / "here")] == ["2 completed, overlapping;"]
    assert "2 completed, overlapping; 1 failed: seed=-1" in ended.stdout


JOBS = ["-m", "seed=1,2,3"]


@pytest.mark.slow  # each job imports torch
@pytest.mark.timeout(300)
def test_parallel_jobs_end_with_the_sweep_and_are_resumed(tiny_root: Path, tmp_path: Path, train_here: Train) -> None:
    """From their last checkpoints: a signal to the sweep kills them."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    typed = ["hydra/launcher=parallel", *overrides_for(tiny_root, "epochs=40", "checkpoint.min_interval_s=0"), *JOBS]
    typed += ["hydra.sweep.dir=here", "hydra.sweep.subdir=${hydra.job.num}"]
    folders = [tmp_path / "here" / str(job) for job in range(2)]
    program, log = [sys.executable, str(REPOSITORY / "train.py"), *typed], tmp_path / "log"
    with log.open("w") as output:
        process = psutil.Popen(program, cwd=tmp_path, stdout=output, stderr=output)
    children = []
    try:
        while not all((folder / "checkpoints" / "last.pt").exists() for folder in folders):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        children = process.children()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        still_running = psutil.wait_procs(children, timeout=60)[1]
    finally:
        for process_left in psutil.wait_procs([process, *children], timeout=0)[1]:
            process_left.kill()
    assert code == ExitCode.UNFINISHED, log.read_text()
    assert still_running == []
    assert {read_run(folder).result.status for folder in folders} == {"killed"}
    assert not (tmp_path / "here" / "2" / "epochs.csv").exists()
    assert "Traceback" not in log.read_text()
    assert "Error executing" not in log.read_text()
    # The stopped jobs are resumed one after the other, and in this process: a launcher imports torch for each job.
    ended = train_here(*typed[1:], "resume=auto")
    assert ended.returncode == 0, ended.stderr
    results = [result_of(tmp_path / "here" / str(job)) for job in range(3)]
    assert [(result["resumed"], len(result["epochs"])) for result in results] == [(job < 2, 40) for job in range(3)]


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path) -> None:
    """The launcher `parallel` builds on the plugin's."""
    start = "import sys; sys.modules['hydra_plugins'] = None; from vitmnist.cli.train import main; main()"
    ended = run_python("-c", start, "-m", "hydra/launcher=parallel", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "error: hydra/launcher=joblib is not installed; run pip install 'vitmnist[launchers]'\n"
    assert not list(tmp_path.iterdir())
