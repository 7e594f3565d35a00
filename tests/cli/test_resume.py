"""A run that was stopped, however, goes on to the bit."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
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
    weights,
    write_mnist_like,
)
from tests.support.processes import TrainProcess, block_training, kill_and_resume
from vitmnist.checkpoint import storage as checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root whose `kmnist` has 300 training and 20 test images."""
    folder = tmp_path_factory.mktemp("resume")
    write_mnist_like(folder / "KMNIST" / "raw", 300, 20)
    return folder


@pytest.fixture
def quick(root: Path) -> list[str]:
    """Six epochs of thirty steps."""
    step = ["trainer.micro_batch=6", "trainer.fused=true", "label_smoothing=0.1"]
    return overrides_for(root, "batch_size=10", "epochs=6", *STATEFUL, *step)


def steps(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


LOADERS_KILLED = {
    "ram": ["data/loader=ram"],
    "disk": ["data/loader=disk", "data.loader.num_workers=2"],
    "prefetch": ["data/loader=prefetch"],
}


@pytest.mark.parametrize("name", LOADERS_KILLED)
def test_killed_twenty_times_a_run_ends_with_the_same_weights(
    name: str, quick: list[str], train: Train, tmp_path: Path
) -> None:
    """By SIGKILL, at random moments: while it starts, between steps, within a save."""
    arguments = [*quick, "epochs=12", *LOADERS_KILLED[name]]
    assert train(*arguments, "hydra.run.dir=whole").returncode == 0
    output = kill_and_resume(tmp_path, arguments, kills=20, seed=name)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert "is damaged" not in output
    assert output.count("resumed after") > 10
    every = {"step": list(range(1, 12 * 30 + 1, 50)), "config": [0]}
    for tag, found in steps(tmp_path / "killed").items():
        assert found == every.get(tag.partition("/")[0], list(range(1, 13))), tag


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_with_another_loader(
    quick: list[str], train: Train, start: Start, tmp_path: Path, number: int, code: int
) -> None:
    hydras = tmp_path / "cut" / ".hydra"
    assert train(*quick, "hydra.run.dir=whole").returncode == 0
    started = start(*quick, "epochs=6", "data/loader=disk", "data.loader.num_workers=1", "hydra.run.dir=cut")
    returned, output = started.until("epoch 2/6").ended(number)
    assert returned == code, output
    assert f"{signal.Signals(number).name} was received; results: cut, resume with" in output
    assert "python train.py resume=cut" in output
    assert "Traceback" not in output
    result = result_of(tmp_path / "cut")
    assert (result["status"], result["error"]) == ("interrupted", f"{signal.Signals(number).name} was received")
    assert 2 <= len(result["epochs"]) < 6
    record = {path.name: path.read_bytes() for path in hydras.iterdir()}
    resumed = train("resume=cut", "data/loader=gpu_slice")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after {len(result['epochs'])} epochs" in resumed.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert {path.name: path.read_bytes() for path in hydras.iterdir()} == record
    assert result_of(tmp_path / "cut")["choices"]["loader"] == "gpu_slice"


def test_a_second_ctrl_c_ends_at_once(quick: list[str], start: Start, tmp_path: Path) -> None:
    """Even in a step that never ends."""
    process = start(*quick, "hydra.run.dir=cut", before=block_training).until("blocked")
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive()
    assert process.ended(signal.SIGINT)[0] == 130
    assert result_of(tmp_path / "cut")["status"] == "interrupted"


def test_the_time_that_was_given_ends_a_run_without_a_fault(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    quick = [*quick, "optimizer=adamw"]  # of two groups of parameters
    ended = train_here(*quick, "max_minutes=0", "hydra.run.dir=cut")
    assert ended.returncode == 0, ended.stderr
    assert "the time limit max_minutes was reached" in ended.stdout
    assert result_of(tmp_path / "cut")["status"] == "interrupted"
    assert train_here("resume=cut", "max_minutes=null").returncode == 0
    assert train_here(*quick, "hydra.run.dir=whole").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_auto_finds_the_newest_unfinished_run_of_the_same_configuration(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    first = train_here(*quick, "resume=auto", "max_minutes=0")
    assert "no unfinished run of this configuration; a new one begins" in first.stdout
    assert train_here(*quick, "seed=1", "max_minutes=0").returncode == 0
    folders = {result_of(folder)["seed"]: folder for folder in (tmp_path / "outputs" / "runs").glob("*/*")}
    again = train_here(*quick, "resume=auto", "max_minutes=null")
    assert again.returncode == 0, again.stderr
    assert f"resume=auto: resuming {folders[42].relative_to(tmp_path)}" in again.stdout
    assert result_of(folders[42])["status"] == "completed"
    assert result_of(folders[1])["status"] == "interrupted"
    assert "a new one begins" in train_here(*quick, "resume=auto", "max_minutes=0").stdout


@pytest.fixture(scope="module")
def stopped(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above a run `cut`, stopped after its first batch."""
    folder = tmp_path_factory.mktemp("stopped")
    settings = ["data/dataset=kmnist", f"data.root={root}", "batch_size=10", "epochs=2", "model=cnn", "optimizer=adamw"]
    ended = TrainProcess(folder, *settings, "max_minutes=0", "hydra.run.dir=cut").ended()
    assert ended[0] == 0, ended[1]
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume=cut", "batch_size=7"], "batch_size=7 (it was 10); only epochs, data.loader"),
        (["resume=cut", "model=vit"], "model.name=vit (it was cnn)"),
        (["resume=cut", "data/dataset=mnist"], "data.dataset.name=mnist (it was kmnist)"),
        (["resume=cut", "optimizer.lr=1"], "optimizer.lr=1 (it was 0.003)"),
        (["resume=cut", "bach_size=7"], "bach_size: there is no such key; did you mean 'batch_size'?"),
        (["resume=nowhere"], "nowhere: holds no run; name a folder such as outputs/runs/"),
        (["resume=cut", "-m"], "resume=cut: resumes one run, and -m starts several"),
    ],
)
def test_what_may_not_change_is_refused_by_name(stopped: Path, arguments: list[str], message: str) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.suffix != ".log"}
    code, output = TrainProcess(stopped, *arguments).ended()
    assert code == 1
    assert message in output
    assert "Traceback" not in output
    assert {path: path.read_bytes() for path in before} == before


def test_a_checkpoint_of_another_version_is_refused_and_kept(stopped: Path, train_here: Train, tmp_path: Path) -> None:
    shutil.copytree(stopped / "cut", tmp_path / "cut")
    kept = checkpoint.load(tmp_path / "cut")
    checkpoint.save(tmp_path / "cut", {**kept, "format": 1})
    before = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    refused = train_here("resume=cut", "max_minutes=null")
    assert refused.returncode == 1
    assert "last.pt: was written by another version of the program (checkpoint format 1; this" in refused.stderr
    assert "start a new run, or resume it with that version" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert sorted((tmp_path / "cut" / "checkpoints").iterdir()) == before


def test_another_data_set_under_the_same_name_is_refused(stopped: Path, tmp_path: Path) -> None:
    write_mnist_like(tmp_path / "KMNIST" / "raw", 299, 20)
    code, output = TrainProcess(stopped, "resume=cut", f"data.root={tmp_path}").ended()
    assert code == 1, output
    assert "the data set is not the one that the run began with: train_images, train_labels" in output, output


def test_a_full_disk_leaves_the_checkpoint_before(quick: list[str], train: Train, start: Start, tmp_path: Path) -> None:
    assert train(*quick, "epochs=1", "hydra.run.dir=cut").returncode == 0
    last = tmp_path / "cut" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, 2 * (len(before) // 2,))
    code, output = start("resume=cut", "epochs=6", before=limit).ended()
    assert code == 1
    assert re.search(
        r"error: cannot write the checkpoint \S+/cut/checkpoints/\S+: File too large; the one before", output
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


def test_saves_within_an_epoch_change_nothing(quick: list[str], train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, "hydra.run.dir=whole").returncode == 0
    assert train_here(*quick, "hydra.run.dir=saved", "checkpoint.every_minutes=1e-9").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "saved")
    assert {epoch["save_s"] for epoch in result_of(tmp_path / "whole")["epochs"]} == {0}
    for epoch in result_of(tmp_path / "saved")["epochs"]:
        assert epoch["save_s"] > 0
        assert epoch["epoch_s"] == pytest.approx(epoch["train_s"] + epoch["eval_s"] + epoch["save_s"])


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(
    quick: list[str], train_here: Train, tmp_path: Path
) -> None:
    ended = train_here(
        *quick, "optimizer=sgd", "optimizer.lr=1e30", "schedule=constant", "checkpoint.every_minutes=1e-9"
    )
    assert ended.returncode == 1
    assert re.search(
        r"in epoch 1, step \d+, .*; \S+/checkpoints/last\.pt is from before it, after epoch 0", ended.stderr
    )
    (file,) = tmp_path.glob("outputs/runs/*/*/checkpoints/last.pt")
    kept = torch.load(file, weights_only=True)
    assert all(value.isfinite().all() for value in kept["step"]["model"].values() if value.is_floating_point())
    assert json.loads(kept["model_info"])["config"]["optimizer"]["lr"] == 1e30


def test_a_run_may_be_stopped_while_it_starts(quick: list[str], tmp_path: Path) -> None:
    for delay in (0.5, 1.5, 2.5):
        command = [sys.executable, str(REPOSITORY / "train.py"), *quick, "epochs=100000", f"hydra.run.dir=cut{delay}"]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            time.sleep(delay)
            process.terminate()
            output = process.communicate(timeout=100)[0]
        assert process.returncode in (143, -signal.SIGTERM), output
        assert "Traceback" not in output


def test_what_was_changed_on_resuming_stays_changed(quick: list[str], train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, "epochs=1", "hydra.run.dir=cut").returncode == 0
    assert train_here("resume=cut", "epochs=3", "max_minutes=0", "data/loader=gpu_slice").returncode == 0
    ended = train_here("resume=cut", "max_minutes=null")
    assert "epoch 3/3" in ended.stdout
    assert "gpu_slice loader" in ended.stdout


def test_a_run_that_is_at_work_is_left_alone(quick: list[str], train: Train, start: Start, tmp_path: Path) -> None:
    started = start(*quick, "epochs=100000", "hydra.run.dir=cut").until("epoch 2/")
    refused = train("resume=cut")
    assert refused.returncode == 1
    assert "in use by another process" in refused.stderr
    other = train(*quick, "epochs=100000", "resume=auto", "hydra.run.dir=cut", "max_minutes=0")
    assert "no unfinished run of this configuration" in other.stdout
    assert started.ended(signal.SIGTERM)[0] == 143


def test_a_sweep_goes_on_when_the_time_of_a_job_is_over_and_ends_when_it_is_stopped(
    quick: list[str], train: Train, start: Start, tmp_path: Path
) -> None:
    ended = train("-m", *quick, "epochs=2", "max_minutes=0,null", "hydra.sweep.dir=sweep")
    assert ended.returncode == 0, ended.stderr
    found = [result_of(folder)["status"] for folder in sorted((tmp_path / "sweep").glob("*-*"))]
    assert found == ["interrupted", "completed"]
    started = start("-m", *quick, "epochs=100000,3", "hydra.sweep.dir=stopped").until("epoch 2/100000")
    code, output = started.ended(signal.SIGTERM)
    assert code == 143, output
    assert "epoch 3/3" not in output
    assert "Traceback" not in output


def test_fewer_epochs_than_are_done_are_refused(quick: list[str], train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, "epochs=2", "hydra.run.dir=cut").returncode == 0
    before = weights(tmp_path / "cut"), result_of(tmp_path / "cut")
    refused = train_here("resume=cut", "epochs=1")
    assert refused.returncode == 1
    assert "epochs=1: the run has begun its epoch 2; type epochs=2 or more" in refused.stderr
    assert result_of(tmp_path / "cut") == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in weights(tmp_path / "cut").items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_spares_the_workers(
    quick: list[str], start: Start, tmp_path: Path, number: int
) -> None:
    """As a terminal sends Ctrl-C, and a batch system SIGTERM."""
    workers = ["data/loader=disk", "data.loader.num_workers=2", "epochs=100000"]
    started = start(*quick, *workers, "hydra.run.dir=cut").until("epoch 2/")
    os.killpg(started.pid, number)
    code, output = started.ended()
    assert code == 128 + number, output
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
    assert started.until("timing").ended(signal.SIGTERM)[0] == 143
    assert result_of(tmp_path / "cut") == before
