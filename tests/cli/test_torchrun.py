"""Several processes train as one would: the same batches, losses and records; they begin, stop and fail together."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import BRIEF, STATEFUL, StartRanks, Train, assert_same_run, result_of, weights, write_mnist_like
from tests.support.fake_queue import simulate_gpus
from tests.support.pages import commands
from tests.support.processes import REPOSITORY, SIGKILL, SIGSTOP, free_port
from vitmnist.errors import ConfigError, ExitCode
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.world import World


@pytest.fixture
def uneven(quick: list[str]) -> list[str]:
    """Overrides for a short run on 23 images in uneven batches: 11, 11 and 1."""
    return [*quick, "batch_size=11", *STATEFUL]


def losses(folder: Path) -> list[float]:
    return [epoch[name] for epoch in result_of(folder)["epochs"] for name in ("train_loss", "eval_loss")]


@pytest.mark.parametrize(("world_size", "loader", "batch_size"), [(3, "prefetch", 4), (2, "disk", 11)])
def test_ranks_learn_what_one_process_learns(
    world_size: int,
    loader: str,
    batch_size: int,
    uneven: list[str],
    ranks: StartRanks,
    train_here: Train,
    tmp_path: Path,
) -> None:
    """Also from a last batch of one image, with parts that are not even, and augmented; but for rounding."""
    pieces = ["trainer.micro_batch=2"] if batch_size > 4 else []
    typed = [*uneven, f"data/loader={loader}", f"batch_size={batch_size}", *pieces]
    typed += ["data.loader.num_workers=0"] if loader == "disk" else []
    assert train_here(*typed, "hydra.run.dir=alone").returncode == 0
    ranks(world_size, *typed, "hydra.run.dir=together").succeeded()
    alone, together = (result_of(tmp_path / name) for name in ("alone", "together"))
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    for epoch, epoch_together in zip(alone["epochs"], together["epochs"], strict=True):
        assert (epoch["train_acc"], epoch["eval_acc"]) == (epoch_together["train_acc"], epoch_together["eval_acc"])
        assert [step["step"] for step in epoch["steps"]] == [step["step"] for step in epoch_together["steps"]]
    assert together["distributed"]["ranks"] == world_size
    for name, value in weights(tmp_path / "alone").items():
        assert torch.allclose(weights(tmp_path / "together")[name], value, atol=1e-4), name
    assert len(list((tmp_path / "together").glob("events*"))) == 1
    logs = {file.name for file in (tmp_path / "together").glob("*.log")}
    assert logs == {"vitmnist.log", *(f"rank-{rank}.log" for rank in range(1, world_size))}


def test_one_rank_times_loaders_and_steps_for_all(uneven: list[str], ranks: StartRanks, tmp_path: Path) -> None:
    """A loader and a step that are chosen by the clock."""
    fast = ["data/loader=auto", *BRIEF, "trainer=fast", "trainer.compile=false", "hydra.run.dir=run"]
    ranks(2, *uneven, *fast).succeeded()
    result = result_of(tmp_path / "run")
    assert result["status"] == "completed"
    assert result["auto"]["name"] != "auto"
    assert result["trainer"]["reasons"]["fused"]


def test_a_checkpoint_is_resumed_by_fewer_ranks(
    uneven: list[str], ranks: StartRanks, train_here: Train, tmp_path: Path
) -> None:
    """Stopped in the middle of an epoch with 2 ranks, and resumed by one process: equal but for rounding."""
    ranks(2, *uneven, "hydra.run.dir=whole").succeeded()
    codes, outputs = ranks(2, *uneven, "max_minutes=0", "hydra.run.dir=cut").ended()
    assert codes == [ExitCode.UNFINISHED] * 2, outputs
    assert result_of(tmp_path / "cut")["status"] == "interrupted"
    assert train_here("resume=cut", "max_minutes=null").returncode == 0
    cut, whole = result_of(tmp_path / "cut"), result_of(tmp_path / "whole")
    assert cut["status"] == "completed"
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert cut["epochs"][-1]["eval_acc"] == whole["epochs"][-1]["eval_acc"]


def test_a_signal_to_one_rank_stops_all_after_the_same_batch(uneven: list[str], ranks: StartRanks) -> None:
    """The ranks save the same step, so that the resumed run equals an uninterrupted one bit for bit."""
    started = ranks(2, *uneven, "epochs=100000", "schedule=constant", "hydra.run.dir=cut").until("epoch 2/")
    os.kill(started.processes[1].pid, signal.SIGTERM)
    codes, outputs = started.ended()
    assert codes == [ExitCode.UNFINISHED] * 2, outputs
    assert "Traceback" not in "".join(outputs)
    assert "torchrun --nproc-per-node=2 train.py resume=cut" in outputs[0]
    cut = result_of(started.folder / "cut")
    assert cut["status"] == "interrupted"
    epochs = f"epochs={len(cut['epochs']) + 2}"
    ranks(2, "resume=cut", epochs).succeeded()
    ranks(2, *uneven, "schedule=constant", epochs, "hydra.run.dir=whole").succeeded()
    assert_same_run(started.folder / "cut", started.folder / "whole")


@pytest.mark.parametrize(
    ("rank", "signum", "message"),
    [
        (1, SIGSTOP, "another rank does not answer"),
        (1, SIGKILL, "another rank does not answer"),
        (0, SIGKILL, "rank 0 has ended"),
    ],
)
def test_a_rank_that_does_not_answer_ends_the_run(
    rank: int, signum: int, message: str, uneven: list[str], ranks: StartRanks
) -> None:
    started = ranks(2, *uneven, "epochs=100000", "hydra.run.dir=cut", "distributed.timeout_s=3").until("epoch 2/")
    os.kill(started.processes[rank].pid, signum)
    code, output = started.processes[1 - rank].ended()
    assert code == 1
    assert "Traceback" not in output
    assert output.count(f"error: {message}") == 1
    assert rank == 0 or message in result_of(started.folder / "cut")["error"]


@pytest.mark.parametrize(
    ("folder", "reasons"),
    [
        ("nowhere", ("error: rank 1 failed: KMNIST is not in", "error: KMNIST is not in")),
        ("there", ("test_images, test_labels differ between the machines", "")),
    ],
)
def test_all_ranks_report_the_first_failure(
    folder: str, reasons: tuple[str, str], uneven: list[str], ranks: StartRanks, tmp_path: Path
) -> None:
    """`data.root` alone may differ from machine to machine, and must hold the same data."""
    write_mnist_like(tmp_path / "there" / "KMNIST" / "raw", test=8)
    codes, outputs = ranks(2, *uneven, each={1: f"data.root={tmp_path / folder}"}, **MACHINES).ended()
    assert codes == [1, 1]
    assert "Traceback" not in "".join(outputs)
    assert outputs[0].count("error: ") == 1
    assert reasons[0] in outputs[0]
    assert reasons[1] in outputs[1]


MACHINES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # two of them, with a process each


def test_machines_may_keep_the_data_elsewhere(uneven: list[str], ranks: StartRanks, tmp_path: Path) -> None:
    write_mnist_like(tmp_path / "there" / "KMNIST" / "raw")
    elsewhere = {1: "data.root=${oc.env:THERE}"}
    machines = {**MACHINES, "THERE": str(tmp_path / "there")}
    stopped = ranks(2, *uneven, "max_minutes=0", "hydra.run.dir=run", each=elsewhere, **machines)
    assert stopped.ended()[0] == [ExitCode.UNFINISHED] * 2
    ranks(2, "resume=run", "max_minutes=null", each=elsewhere, **machines).succeeded()
    assert result_of(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["device=cuda:0"], "device=cuda:0: names one device for 2 processes; set device=cuda"),
        (["-m", "seed=1,2"], "-m: torchrun cannot run a sweep"),
        (["resume=nowhere"], "nowhere: holds no run"),
    ],
)
def test_an_impossible_command_line_is_one_error(
    typed: list[str], message: str, uneven: list[str], ranks: StartRanks
) -> None:
    options = [argument for argument in typed if argument.startswith("-")]
    started = ranks(2, *options, *uneven, *(argument for argument in typed if argument not in options))
    codes, outputs = started.ended()
    assert codes == [1, 1], outputs
    said = [line for output in outputs for line in output.splitlines() if line.startswith("error: ")]
    said = [line for line in said if not line.startswith("error: rank 1 failed: ")]
    assert len(said) == 1, outputs
    assert message in said[0]
    assert "Traceback" not in "".join(outputs)
    assert not [*started.folder.rglob("result.json"), *started.folder.rglob(".hydra")]


def test_a_port_in_use_is_named(ranks: StartRanks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        codes, outputs = ranks(1, MASTER_PORT=port, WORLD_SIZE="2").ended()
    assert codes == [1]
    assert f"error: the 2 processes cannot meet at 127.0.0.1:{port}" in outputs[0]
    assert "--master-port=PORT" in outputs[0]
    assert "Traceback" not in outputs[0]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpus(monkeypatch, 2)
    world = World()
    world.size = 4
    for world.rank in range(4):
        world.local_rank = world.rank
        if world.rank < 2:
            assert choose_device("auto", world) == choose_device("cuda", world) == torch.device("cuda", world.rank)
        else:
            with pytest.raises(ConfigError, match=rf"torch sees 2 GPUs here, so rank {world.rank} cannot use cuda:"):
                choose_device("auto", world)


@pytest.mark.parametrize("uuids", [["a", "b"], ["a", "a"]], ids=["confined", "the same"])
def test_a_task_of_slurm_uses_the_only_gpu_that_it_sees(uuids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task calls its GPU cuda:0. If it is the same GPU, the second rank has none."""
    simulate_gpus(monkeypatch, 1)
    world = World()
    world.size, world.rank, world.local_rank = 2, 1, 1
    monkeypatch.setattr(world, "all_gather_object", lambda value: [[uuid] for uuid in uuids])
    if uuids[0] == uuids[1]:
        with pytest.raises(ConfigError, match="torch sees 1 GPUs here, so rank 1 cannot use cuda:1"):
            choose_device("auto", world)
    else:
        assert choose_device("auto", world) == torch.device("cuda", 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_documented_command_trains_and_starts_again_from_the_last_checkpoint(
    uneven: list[str], tmp_path: Path
) -> None:
    """One rank is killed; torchrun ends the other, and starts both again in the same folder."""
    ((two_ranks, _, *documented),) = commands("torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", two_ranks, "--max-restarts=1"]
    typed = [*documented, *uneven, "epochs=60", "checkpoint.min_interval_s=0", "hydra.run.dir=run", "resume=auto"]
    with (tmp_path / "output.txt").open("w+") as output:
        started = subprocess.Popen(
            [*torchrun, f"--master-port={free_port()}", str(REPOSITORY / "train.py"), *typed],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + 120
        while "epoch 3/" not in (tmp_path / "output.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[-1]), SIGKILL)
        assert started.wait(150) == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert "resume=auto: resuming run" in text
    result = result_of(tmp_path / "run")
    assert (result["status"], result["distributed"]) == ("completed", {"ranks": 2})
    assert [epoch["epoch"] for epoch in result["epochs"]] == list(range(60))
