"""A run that was stopped, however, goes on to the bit."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import (
    REPOSITORY,
    STATEFUL,
    Start,
    Train,
    assert_same_run,
    overrides_for,
    result_of,
    write_mnist_like,
)
from tests.support.processes import TrainProcess, block_reading, block_training, kill_and_resume
from vitmnist.runtime.files import is_in_use
from vitmnist.runtime.signals import UNFINISHED


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root whose `kmnist` has 300 training and 20 test images."""
    folder = tmp_path_factory.mktemp("resume")
    write_mnist_like(folder / "KMNIST" / "raw", 300, 20)
    return folder


@pytest.fixture(scope="module")
def quick(root: Path) -> list[str]:
    """Six epochs of thirty steps."""
    step = ["trainer.micro_batch=6", "trainer.fused=true", "label_smoothing=0.1"]
    return overrides_for(root, "batch_size=10", "epochs=6", *STATEFUL, *step)


@pytest.fixture(scope="module")
def whole(quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `quick` that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = TrainProcess(folder, *quick, "hydra.run.dir=run").ended()
    assert code == 0, output
    return folder / "run"


def steps(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


LOADERS_KILLED = {
    "ram": ["data/loader=ram"],
    "disk": ["data/loader=disk", "data.loader.num_workers=2"],
    "prefetch": ["data/loader=prefetch"],
}


@pytest.mark.parametrize(
    ("name", "kills"),
    [("disk", 3), *(pytest.param(name, 8, marks=pytest.mark.slow) for name in LOADERS_KILLED)],
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(
    name: str, kills: int, quick: list[str], train: Train, tmp_path: Path
) -> None:
    """By SIGKILL, at random moments: while it starts, between steps, within a save."""
    arguments = [*quick, "epochs=12", *LOADERS_KILLED[name]]
    assert train(*arguments, "hydra.run.dir=whole").returncode == 0
    output = kill_and_resume(tmp_path, arguments, kills=kills, seed=name)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert "is damaged" not in output
    assert output.count("resumed after") > kills // 2
    every = {"step": list(range(1, 12 * 30 + 1, 50)), "config": [0], "summary": [12]}
    for tag, found in steps(tmp_path / "killed").items():
        assert found == every.get(tag.partition("/")[0], list(range(1, 13))), tag


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_with_another_loader(
    quick: list[str], whole: Path, train: Train, start: Start, tmp_path: Path, number: int
) -> None:
    started = start(*quick, "epochs=6", "data/loader=disk", "data.loader.num_workers=1", "hydra.run.dir=cut")
    returned, output = started.until("epoch 2/6").ended(number)
    assert returned == UNFINISHED, output
    assert f"{signal.Signals(number).name} was received; results: cut, resume with" in output
    assert "python train.py resume=cut" in output
    assert "Traceback" not in output
    result = result_of(tmp_path / "cut")
    assert (result["status"], result["error"]) == ("interrupted", f"{signal.Signals(number).name} was received")
    assert 2 <= len(result["epochs"]) < 6
    resumed = train("resume=cut", "data/loader=gpu_slice")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after {len(result['epochs'])} epochs" in resumed.stdout
    assert_same_run(whole, tmp_path / "cut")
    assert result_of(tmp_path / "cut")["resumed"]
    assert result_of(tmp_path / "cut")["choices"]["loader"] == "gpu_slice"


def test_a_second_ctrl_c_ends_at_once(quick: list[str], start: Start, tmp_path: Path) -> None:
    """Even in a step that never ends."""
    process = start(*quick, "hydra.run.dir=cut", before=block_training).until("blocked")
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive()
    assert process.ended(signal.SIGINT)[0] == 130
    assert result_of(tmp_path / "cut")["status"] == "interrupted"


def test_a_full_disk_leaves_the_checkpoint_before(quick: list[str], train: Train, start: Start, tmp_path: Path) -> None:
    assert train(*quick, "epochs=1", "hydra.run.dir=cut").returncode == 0
    last = tmp_path / "cut" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, 2 * (len(before) // 2,))
    code, output = start("resume=cut", "epochs=6", before=limit).ended()
    assert code == 1
    assert re.search(
        r"error: cannot write the checkpoint \S+/cut/checkpoints/\S+: File too large; the previous", output
    )
    assert "Traceback" not in output
    assert last.read_bytes() == before
    assert result_of(tmp_path / "cut")["status"] == "failed"
    assert train("resume=cut", "epochs=6").returncode == 0


def test_a_folder_that_is_removed_under_the_run_is_named(quick: list[str], start: Start, tmp_path: Path) -> None:
    started = start(*quick, "epochs=100000", "hydra.run.dir=gone").until("epoch 1/")
    while (tmp_path / "gone").exists():
        subprocess.run(["rm", "-rf", str(tmp_path / "gone")], check=False)
    code, output = started.ended()
    assert code == 1
    assert re.search(r"error: cannot write .*gone", output)
    assert "Traceback" not in output


def test_an_event_file_that_lost_its_tail_still_reads_and_is_mended(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    assert train_here(*quick, "epochs=3", "hydra.run.dir=cut").returncode == 0
    (file,) = (tmp_path / "cut").glob("events*")
    os.truncate(file, file.stat().st_size - 300)
    assert steps(tmp_path / "cut")["train/loss"] == [1, 2, 3]
    assert train_here("resume=cut", "epochs=4").returncode == 0
    assert steps(tmp_path / "cut")["gpu/util_pct" if torch.cuda.is_available() else "memory/host_mib"] == [1, 2, 3, 4]


def test_saves_within_an_epoch_change_nothing(quick: list[str], whole: Path, train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, "hydra.run.dir=saved", "checkpoint.every_minutes=1e-9").returncode == 0
    assert_same_run(whole, tmp_path / "saved")
    assert {epoch["save_s"] for epoch in result_of(whole)["epochs"]} == {0}
    for epoch in result_of(tmp_path / "saved")["epochs"]:
        assert epoch["save_s"] > 0
        assert epoch["epoch_s"] == pytest.approx(epoch["train_s"] + epoch["eval_s"] + epoch["save_s"])


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    ended = train_here(
        *quick, "optimizer=sgd", "optimizer.lr=1e30", "schedule=constant", "checkpoint.every_minutes=1e-9"
    )
    assert ended.returncode == 1
    assert re.search(r"in epoch 1, step \d+, .* try a smaller optimizer\.lr", ended.stderr)
    (file,) = tmp_path.glob("outputs/runs/*/*/checkpoints/last.pt")
    kept = torch.load(file, weights_only=True)
    assert all(value.isfinite().all() for value in kept["step"]["model"].values() if value.is_floating_point())
    assert kept["config"]["optimizer"]["lr"] == 1e30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_starts_at_once(quick: list[str], tmp_path: Path, number: int) -> None:
    """Also while torch is imported, of which an exception can get lost in C++ code."""
    for delay in (0.5, 1.0, 1.5, 2.0):
        command = [sys.executable, str(REPOSITORY / "train.py"), *quick, "epochs=100000", f"hydra.run.dir=cut{delay}"]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            time.sleep(delay)
            process.send_signal(number)
            output = process.communicate(timeout=100)[0]
        if process.returncode != UNFINISHED:  # a fast machine has begun to train
            assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM), output
            assert re.fullmatch(r"interrupted(; results: .*)?\n" if number == signal.SIGINT else "", output)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_picture_that_cannot_be_read_to_its_end_does_not_keep_the_program(
    start: Start, tmp_path: Path, number: int, code: int
) -> None:
    for picture in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        (tmp_path / "pictures" / picture).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / picture).touch()
    folder = ["data/dataset=image_folder", "data.dataset.path=pictures", "data.root=root"]
    started = start(*folder, "data.dataset.test_share=0.5", "hydra.run.dir=run", before=block_reading).until("blocked")
    assert started.ended(number)[0] == code


def test_a_resumed_run_keeps_its_folder_locked(quick: list[str], start: Start, tmp_path: Path) -> None:
    """Also after it has looked for the result that a killed run does not have."""
    start(*quick, "epochs=100000", "hydra.run.dir=cut").until("epoch 1/100000").ended(signal.SIGKILL)
    start("resume=cut").until("epoch 3/100000")
    assert is_in_use(tmp_path / "cut")


def test_a_run_that_is_at_work_is_left_alone(quick: list[str], train: Train, start: Start, tmp_path: Path) -> None:
    started = start(*quick, "epochs=100000", "hydra.run.dir=cut").until("epoch 2/")
    refused = train("resume=cut")
    assert refused.returncode == 1
    assert "in use by another process" in refused.stderr
    again = train(*quick, "epochs=100000", "resume=auto", "hydra.run.dir=cut")
    assert again.returncode == 1
    assert "in use by another process" in again.stderr
    assert started.ended(signal.SIGTERM)[0] == UNFINISHED


def test_a_sweep_goes_on_when_the_time_of_a_job_is_over_and_ends_when_it_is_stopped(
    quick: list[str], train: Train, start: Start, tmp_path: Path
) -> None:
    ended = train("-m", *quick, "epochs=2", "max_minutes=0,null", "hydra.sweep.dir=sweep")
    assert ended.returncode == UNFINISHED, ended.stderr
    assert "1 of 2 jobs are unfinished: 0-" in ended.stdout
    found = [result_of(folder)["status"] for folder in sorted((tmp_path / "sweep").glob("*-*"))]
    assert found == ["interrupted", "completed"]
    started = start("-m", *quick, "epochs=100000,3", "hydra.sweep.dir=stopped").until("epoch 2/100000")
    code, output = started.ended(signal.SIGTERM)
    assert code == UNFINISHED, output
    assert "epoch 3/3" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_the_whole_group_spares_the_workers(
    quick: list[str], start: Start, tmp_path: Path, number: int
) -> None:
    """As a terminal sends Ctrl-C, and a batch system SIGTERM."""
    workers = ["data/loader=disk", "data.loader.num_workers=2", "epochs=100000"]
    started = start(*quick, *workers, "hydra.run.dir=cut").until("epoch 2/")
    os.killpg(started.pid, number)
    code, output = started.ended()
    assert code == UNFINISHED, output
    assert "Traceback" not in output
    assert result_of(tmp_path / "cut")["status"] == "interrupted"


def test_a_stop_while_a_run_is_resumed_leaves_its_records(
    quick: list[str], train: Train, start: Start, tmp_path: Path
) -> None:
    assert train(*quick, "epochs=1", "hydra.run.dir=cut").returncode == 0
    before = result_of(tmp_path / "cut")
    started = start(
        "resume=cut", "epochs=2", "data/loader=auto", "data.loader.seconds=1000", "data.loader.batches=1000"
    )
    assert started.until("timing").ended(signal.SIGINT)[0] == 130
    assert "interrupted; results: cut, resume with\n    python train.py resume=cut" in started.output
    assert result_of(tmp_path / "cut") == before
