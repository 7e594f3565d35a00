"""Shared fixtures: tiny data, and the program as its users start it."""

import atexit
import gc
import json
import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from math import ceil
from pathlib import Path

# Several processes with as many threads as cores would wait for each other. Programs that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import TrainProcess, TrainRanks, kill_leftovers, skip_without, start_ranks
from vitmnist.__main__ import command_main
from vitmnist.cli.train import main
from vitmnist.data.datasets.base import Dataset, load_dataset
from vitmnist.data.datasets.standard import FILES
from vitmnist.errors import ExitCode
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.runtime.cpu import available_cores

PLAIN = "log.images_every_epochs=null"  # Drawing images takes most of the time of a short run.
BRIEF = ("data.loader.seconds=0.1",)  # By default, `auto` times each loader for seconds.
STATEFUL = ("schedule=one_cycle", "ema_decay=0.9", "data/augment=shift")  # A resumed run restores their states.
Program = str | Callable[[], None]  # the name of a command, or a function that reads `sys.argv`
CallHere = Callable[..., "subprocess.CompletedProcess[str]"]
Train = Callable[..., "subprocess.CompletedProcess[str]"]
Printed = Callable[..., str]  # The type of `output_of`, `succeed` and `refuse`
Start = Callable[..., TrainProcess]
StartRanks = Callable[..., TrainRanks]
AddMembers = Callable[..., None]


def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than cores, because tests wait for the processes that they start."""
    return available_cores() + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        skip_without(*marker.args)


@pytest.hookimpl(trylast=True)  # when only the chosen tests are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker begin with its part of the longest tests: those that have a time limit of their own."""
    longest = [item for item in items if item.get_closest_marker("timeout")]
    others = [item for item in items if not item.get_closest_marker("timeout")]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = ceil(len(others) / workers)  # The first tests of `items` go to the first worker, and so on.
    parts = [longest[index::workers] + others[index * size :][:size] for index in range(workers)]
    items[:] = [item for part in parts for item in part]


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, because each run in this process collects twice."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # Libraries report frozen objects as leaks.


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt what the tests of a module imported, too."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def add_members() -> Iterator[AddMembers]:
    """Add or replace members of a registry until the test ends, as `temporarily` does."""
    with ExitStack() as stack:
        yield lambda registry, **members: stack.enter_context(registry.temporarily(**members))


def write_idx(path: Path, array: torch.Tensor) -> None:
    header = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape)
    path.write_bytes(header + array.numpy().tobytes())


def write_mnist_like(folder: Path, train: int = 23, test: int = 7, side: int = 28) -> None:
    """Write four unpacked IDX files of random images into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for names, size in ((FILES[:2], train), (FILES[2:], test)):
        images = torch.randint(0, 256, (size, side, side), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (size,), generator=generator, dtype=torch.uint8)
        write_idx(folder / names[0], images)
        write_idx(folder / names[1], labels)


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root whose `kmnist` has 23 training and 7 test images."""
    root = tmp_path_factory.mktemp("data")
    write_mnist_like(root / "KMNIST" / "raw")
    return root


@pytest.fixture(scope="session")
def tiny(tiny_root: Path) -> Dataset:
    return load_dataset("kmnist", root=str(tiny_root))


def overrides_for(data_root: Path, *more: str) -> list[str]:
    """Overrides for a run of about a second: the `kmnist` of `data_root`, a CNN and two epochs."""
    return ["data/dataset=kmnist", f"data.root={data_root}", "batch_size=6", "epochs=2", "model=cnn", PLAIN, *more]


@pytest.fixture
def quick(tiny_root: Path) -> list[str]:
    """Overrides for a run of about a second: 23 images in batches of 6, 6, 6 and 5, twice."""
    return overrides_for(tiny_root)


def call_program(program: Program, *arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | int:
    """Call a program in a folder, within this process. Returns its exit code or last message."""
    run = command_main(program) if isinstance(program, str) else program
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    # A fork server that starts here also forks the processes of later tests. Keep the modules that they need.
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)
    try:
        run()
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.fixture
def call_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CallHere:
    """Call a program with arguments, in an empty folder but within this process."""

    def call(program: Program, *arguments: str, folder: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = call_program(program, *arguments, folder=folder, monkeypatch=monkeypatch)
        printed = capsys.readouterr()
        if isinstance(code, str):  # Python prints a text and exits with 1.
            return subprocess.CompletedProcess(arguments, 1, printed.out, f"{printed.err}{code}\n")
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return call


@pytest.fixture
def train_here(call_here: CallHere) -> Train:
    """Run `train.py` in an empty folder with the given arguments, within this process."""
    return partial(call_here, main)


@pytest.fixture
def output_of(call_here: CallHere) -> Printed:
    """Like `call_here`, but the program must end with exit code 0. Returns its stdout."""

    def call(program: Program, *arguments: str, **options: Path) -> str:
        ended = call_here(program, *arguments, **options)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return call


@pytest.fixture
def succeed(output_of: Printed) -> Printed:
    """Like `train_here`, but the program must end with exit code 0. Returns its stdout."""
    return partial(output_of, main)


@pytest.fixture
def refuse(train_here: Train) -> Printed:
    """Like `train_here`, but the program must end with exit code 1 and no traceback. Returns its stderr."""

    def call(*arguments: str, **options: Path) -> str:
        ended = train_here(*arguments, **options)
        assert ended.returncode == 1, ended.stdout
        assert "Traceback" not in ended.stdout + ended.stderr
        return ended.stderr

    return call


@pytest.fixture(scope="session")
def stateful(tiny_root: Path) -> list[str]:
    """Overrides for a run with a schedule, an average of weights, augmentation, and two parameter groups."""
    return overrides_for(tiny_root, *STATEFUL, "optimizer=adamw")


@pytest.fixture(scope="session")
def runs(stateful: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `whole` is completed, and `cut` was stopped by its time limit after the first batch."""
    folder = tmp_path_factory.mktemp("runs")
    for code, arguments in (
        (0, ["hydra.run.dir=whole"]),
        (ExitCode.UNFINISHED, ["hydra.run.dir=cut", "max_minutes=0"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            assert call_program(main, *stateful, *arguments, folder=folder, monkeypatch=patch) == code
    assert result_of(folder / "cut")["error"] == "the time limit max_minutes was reached"
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `run`: MNIST, two epochs of 2,000 images."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = ["data.dataset.train_size=2000", "data.dataset.test_size=300", f"data.root={folder / 'data'}"]
    settings = ["model=cnn", "batch_size=20", "epochs=2", "hydra.run.dir=run"]
    code, output = TrainProcess(folder, *sizes, *settings).ended()
    assert code == 0, output
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `train.py` in an empty folder with some arguments, without waiting for it."""
    yield partial(TrainProcess, tmp_path)
    kill_leftovers()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[StartRanks]:
    """Start several ranks of `train.py` in an empty folder, without waiting for them."""
    yield partial(start_ranks, tmp_path)
    kill_leftovers()


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a completed run."""
    return load_file(folder / "checkpoints" / "final.safetensors")


def learned(folder: Path) -> list[dict]:
    """The logged steps, and the metrics that depend on the weights, of each epoch."""
    names = ["steps", *(name for name, metric in build_epoch_table().items() if metric.depends_on_weights)]
    return [{name: epoch.get(name) for name in names} for epoch in result_of(folder)["epochs"]]


def assert_same_weights(first: Path, second: Path) -> None:
    """Compare the final weights of two runs bit for bit: their files are identical."""
    first_file, second_file = (folder / "checkpoints" / "final.safetensors" for folder in (first, second))
    assert first_file.read_bytes() == second_file.read_bytes()


def assert_same_run(first: Path, second: Path) -> None:
    """Compare two completed runs bit for bit: weights, logged steps and metrics."""
    assert result_of(first)["status"] == result_of(second)["status"] == "completed"
    assert learned(first) == learned(second)
    assert_same_weights(first, second)
