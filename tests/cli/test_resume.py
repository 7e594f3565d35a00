"""A run continues bit for bit, however it was stopped."""

import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.conftest import STATEFUL, Printed, Start, assert_same_run, overrides_for, result_of, write_mnist_like
from tests.support.outputs import events
from tests.support.processes import SIGHUP, SIGUSR1, TrainProcess, block_training, kill_and_resume
from vitmnist.checkpoint import storage
from vitmnist.errors import ExitCode


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root whose `kmnist` has 300 training and 20 test images."""
    folder = tmp_path_factory.mktemp("resume")
    write_mnist_like(folder / "KMNIST" / "raw", 300, 20)
    return folder


@pytest.fixture(scope="module")
def long(root: Path) -> list[str]:
    """Overrides for a run of six epochs of thirty steps."""
    step = ["trainer.micro_batch=6", "trainer.fused=true", "loss.label_smoothing=0.1"]
    return overrides_for(root, "batch_size=10", "epochs=6", *STATEFUL, *step)


@pytest.fixture(scope="module")
def whole(long: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `long` that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = TrainProcess(folder, *long, "hydra.run.dir=run").ended()
    assert code == 0, output
    return folder / "run"


@pytest.mark.parametrize(
    ("name", "kills"),
    [("disk", 3), pytest.param("ram", 4, marks=pytest.mark.slow), pytest.param("prefetch", 4, marks=pytest.mark.slow)],
)
def test_a_killed_run_ends_as_a_whole_one(name: str, kills: int, long: list[str], whole: Path, tmp_path: Path) -> None:
    """By SIGKILL, at random moments: while it starts, between steps, within a save. No save changes anything."""
    workers = ["data.loader.num_workers=2"] if name == "disk" else []
    output = kill_and_resume(tmp_path, [*long, f"data/loader={name}", *workers], kills=kills, seed=name)
    assert_same_run(whole, tmp_path / "killed")
    assert "is damaged" not in output
    assert output.count("resumed after") > kills // 2
    every = {"train_step": list(range(1, 6 * 30 + 1, 50))}
    shown = events(tmp_path / "killed")
    for tag in shown.Tags()["scalars"]:
        steps = [event.step for event in shown.Scalars(tag)]
        assert steps == every.get(tag.partition("/")[0], list(range(1, 7))), tag


SLOW_SIGNALS = [pytest.param(signum, marks=pytest.mark.slow) for signum in (SIGHUP, SIGUSR1)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, *SLOW_SIGNALS])
def test_a_signal_saves_and_the_run_continues_with_another_loader(
    long: list[str], whole: Path, succeed: Printed, start: Start, tmp_path: Path, signum: int
) -> None:
    started = start(*long, "data/loader=disk", "data.loader.num_workers=1", "hydra.run.dir=cut")
    returned, output = started.until("epoch 2/6").ended(signum)
    assert returned == ExitCode.UNFINISHED, output
    assert f"{signal.Signals(signum).name} was received; results: cut, resume with" in output
    assert "python train.py resume=cut" in output
    assert "Traceback" not in output
    result = result_of(tmp_path / "cut")
    assert (result["status"], result["error"]) == ("interrupted", f"{signal.Signals(signum).name} was received")
    assert 2 <= len(result["epochs"]) < 6
    assert f"resumed after {len(result['epochs'])} epochs" in succeed("resume=cut", "data/loader=gpu_slice")
    assert_same_run(whole, tmp_path / "cut")
    assert result_of(tmp_path / "cut")["resumed"]
    assert result_of(tmp_path / "cut")["config"]["data"]["loader"]["name"] == "gpu_slice"


def test_a_second_ctrl_c_ends_at_once(long: list[str], start: Start, tmp_path: Path) -> None:
    """Even in a step that never ends."""
    process = start(*long, "hydra.run.dir=cut", before=block_training).until("blocked")
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive()
    assert process.ended(signal.SIGINT)[0] == 130
    assert result_of(tmp_path / "cut")["status"] == "interrupted"


def test_an_infinite_loss_leaves_the_last_good_checkpoint(long: list[str], refuse: Printed, tmp_path: Path) -> None:
    sgd = ["optimizer=sgd", "optimizer.lr=1e30", "schedule=constant"]
    printed = refuse(*long, *sgd, "checkpoint.every_minutes=1e-9", "hydra.run.dir=run")
    assert re.search(r"in epoch 1, step \d+, .* try a smaller optimizer\.lr", printed)
    kept = storage.read_newest_checkpoint(tmp_path / "run")
    assert all(value.isfinite().all() for value in kept["step"]["model"].values() if value.is_floating_point())
    assert kept["config"]["optimizer"]["lr"] == 1e30


@pytest.mark.parametrize(
    "loader",
    [
        ["data/loader=disk", "data.loader.num_workers=2"],
        ["data/loader=prefetch", "data/loader@data.loader.base=disk", "data.loader.base.num_workers=2"],
    ],
)
def test_a_worker_that_is_killed_ends_the_run_with_one_message(
    loader: list[str], long: list[str], start: Start, tmp_path: Path
) -> None:
    started = start(*long, *loader, "epochs=100000", "hydra.run.dir=cut").until("epoch 2/")
    psutil.Process(started.pid).children()[0].kill()
    code, output = started.ended()
    assert code == ExitCode.FAILED
    assert output.count("num_workers=N") == output.count("error: ") == 1, output
    # Torch's signal handler can raise within a `__del__` of torch, whose traceback the interpreter prints.
    assert "Traceback" not in output or "Exception ignored in" in output


def test_a_signal_to_the_whole_group_spares_the_workers(long: list[str], start: Start, tmp_path: Path) -> None:
    """As a terminal sends Ctrl-C."""
    workers = ["data/loader=disk", "data.loader.num_workers=2", "epochs=100000"]
    started = start(*long, *workers, "hydra.run.dir=cut").until("epoch 2/")
    os.killpg(started.pid, signal.SIGINT)
    code, output = started.ended()
    assert code == ExitCode.UNFINISHED, output
    assert "Traceback" not in output
    assert result_of(tmp_path / "cut")["status"] == "interrupted"


def test_a_stop_while_a_run_is_resumed_leaves_its_records(whole: Path, start: Start, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "cut")
    before = result_of(tmp_path / "cut")
    timed = ["data/loader=auto", "data.loader.seconds=1000", "data.loader.batches=1000"]
    started = start("resume=cut", "epochs=8", *timed).until("timing")
    assert started.ended(signal.SIGINT)[0] == 130
    assert "interrupted; results: cut, resume with\n    python train.py resume=cut" in started.output
    assert result_of(tmp_path / "cut") == before
