"""The commands in the README and in `docs/` work as they stand, and the training loop of the README learns."""

from pathlib import Path

import pytest
from torchvision import datasets as torchvision_datasets

from tests.conftest import CallHere, Printed
from tests.support.benchmarks import BENCHMARKS
from tests.support.cifar import write_cifar
from tests.support.pages import README, blocks, commands, draw, small
from tests.support.processes import TrainProcess, run_python

# Sweeps of many jobs; tests/cli/test_sweep.py has one.
LONG = ("experiment=loaders", "experiment=smoke", "repeats=")


def is_slow(arguments: list[str]) -> bool:
    """Whether it is none of the README's short commands."""
    return arguments not in commands("python train.py", README) or any(word in " ".join(arguments) for word in LONG)


@pytest.mark.parametrize(
    "arguments",
    # tests/cli/test_launchers.py runs the command with a launcher, and tests/cli/test_torchrun.py the torchrun command.
    [
        pytest.param(arguments, marks=[pytest.mark.slow] * is_slow(arguments))
        for arguments in commands("python train.py")
        if "launcher" not in " ".join(arguments)
    ],
    ids=" ".join,
)
def test_documented_train_commands_run(
    arguments: list[str], succeed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if "data/dataset=cifar10" in arguments:
        write_cifar(tmp_path / "data", torchvision_datasets.CIFAR10, 100, monkeypatch)
    succeed(*small(arguments, tmp_path))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in `outputs` and some image files."""
    folder = tmp_path_factory.mktemp("trained")
    code, output = TrainProcess(folder, "model=cnn", *small([], folder)).ended()
    assert code == 0, output
    draw(*(folder / name for name in ("scan.png", "other.jpg", "scans/a.png", "more/b/c.png")))
    draw(*(folder / "pictures" / f"class {number % 2}" / f"{number}.png" for number in range(20)))
    return folder


@pytest.mark.parametrize(
    "arguments",
    # tests/diagnosis/test_stories.py runs the command on a script, and tests/cli/test_export.py exports to ONNX.
    [arguments for arguments in commands("vitmnist") if arguments[0] != "diagnose" and "onnx" not in arguments],
    ids=" ".join,
)
def test_documented_commands_on_a_trained_run_work(arguments: list[str], trained: Path, call_here: CallHere) -> None:
    (run,) = trained.glob("outputs/runs/*/*")
    typed = [str(run) if argument == "RUN" else argument for argument in arguments]
    ended = call_here(*typed, folder=trained)
    assert (ended.returncode, bool(ended.stdout)) == (0, True), ended.stderr


def test_tensorboard_shows_a_run(trained: Path) -> None:
    (arguments,) = commands("tensorboard")
    ended = run_python("-m", "tensorboard.main", *arguments, "--inspect", folder=trained)
    assert "usage/epoch_s" in ended.stdout, ended.stderr


def test_every_documented_command_is_one_of_those_tested() -> None:
    programs = ["python train.py", "torchrun", "vitmnist", "tensorboard", "pip install", "pytest", "pre-commit"]
    programs += [f"python benchmarks/{name}.py" for name in [*BENCHMARKS, "gpu"]]
    assert len(commands("")) == sum(len(commands(program)) for program in programs)
    assert README.read_text().count("&& pytest\n") == 1  # CI runs this line


def test_readme_training_loop_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop,) = (block for block in blocks("python", README) if "make_loader" in block)
    monkeypatch.chdir(tmp_path)
    exec(loop, {})
    first, second = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert second < first < 0.6
