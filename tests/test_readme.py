"""What the README and the page on extending show works as it stands."""

from __future__ import annotations

import csv
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import PLAIN, REPOSITORY, Train, result_of
from tests.data.datasets.test_image_folder import draw
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.models.vit import ViT, ViTOptions

README = (REPOSITORY / "README.md").read_text()
EXTENDING = (REPOSITORY / "docs" / "extending.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if line
]
SMALL = [PLAIN, "epochs=1", "repeats=1", "data.dataset.train_size=40", "data.dataset.test_size=20"]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def train_commands() -> list[list[str]]:
    """Each `python train.py …` of the README, without what comes before a `&&`."""
    commands = [shlex.split(part) for line in COMMANDS for part in line.split("&&")]
    return [command for command in commands if command[:2] == ["python", "train.py"]]


def small(arguments: list[str], folder: Path) -> list[str]:
    """The arguments of a run, with few images, and pictures where the README has some."""
    for number in range(110):
        draw(folder / "pictures" / f"class {number % 2}" / f"{number}.png", number)
    few = [] if any(argument.startswith("--") for argument in arguments) else SMALL
    return [*arguments, *few, f"data.root={folder / 'data'}"]


def run_small(arguments: list[str], folder: Path, program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), *small(arguments, folder)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("command", train_commands(), ids=" ".join)
def test_a_command_of_the_readme_runs(
    command: list[str], train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ended = train_here(*small(command[2:], tmp_path))
    assert ended.returncode == 0, ended.stderr


def test_the_readmes_processes_train_together(tmp_path: Path) -> None:
    (command,) = (shlex.split(line) for line in COMMANDS if line.startswith("torchrun"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", command[1], str(REPOSITORY / "train.py")]
    ended = subprocess.run(
        [*launcher, *small(command[3:], tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "divided among 2 processes" in ended.stdout


def test_what_the_readme_says_of_using_a_model_works(tmp_path: Path) -> None:
    assert run_small(["model=cnn"], tmp_path, REPOSITORY / "train.py").returncode == 0
    (folder,) = (tmp_path / "outputs" / "runs").glob("*/*")
    draw(tmp_path / "scan.png", 0)
    commands = [shlex.split(line) for line in COMMANDS if line.startswith("python -m vitmnist.")]
    assert {command[2] for command in commands} == {"vitmnist.evaluate", "vitmnist.predict", "vitmnist.report"}
    for command in commands:
        arguments = [str(folder) if argument.endswith("DATE/TIME-…") else argument for argument in command[1:]]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr


def test_only_commands_that_are_tested_stand_in_the_readme() -> None:
    tested = {
        "python train.py",
        "torchrun",
        "pip install",
        "pytest",
        "tensorboard --logdir",
        "python benchmarks/epoch.py",
        "python benchmarks/loaders.py",
        "python benchmarks/time_to_accuracy.py",
        "python -m vitmnist.",
    }
    for line in COMMANDS:
        for part in line.split("&&"):
            assert any(part.strip().startswith(start) for start in tested), part


def benchmark(name: str) -> ModuleType:
    """A script of `benchmarks/`, as a module."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_the_benchmark_of_an_epoch_compares_what_it_promises(tmp_path: Path, tiny: Dataset) -> None:
    epoch = benchmark("epoch")
    arguments = Namespace(batch_size=5, num_workers=[0, 2], root=str(tmp_path), compile=True)
    names = set(epoch.candidates(tiny.train, torch.device("cpu"), arguments, ExitStack())) - {"Lightning"}
    theirs = {"bare loop", *(f"article's loop, {way}" for way in ("disk", "RAM", "slices", "RAM, our model"))}
    assert theirs < names
    ours = {name.partition(",")[0].partition(" of ")[0] for name in names - theirs}
    assert ours == {"one resident batch", *LOADERS.names()} - {"auto"}
    assert {"gpu_slice, trainer=fast", "gpu_slice, trainer=fast, compiled"} < names


def test_the_benchmark_of_an_epoch_writes_its_table(tmp_path: Path) -> None:
    (command,) = (shlex.split(line) for line in COMMANDS if line.startswith("python benchmarks/epoch.py"))
    small = ["--train-size=60", "--batch-size=20", "--rounds=1", f"--root={tmp_path}", f"--output={tmp_path / 'table'}"]
    program = [sys.executable, str(REPOSITORY / command[1]), *command[2:], *small]
    ended = subprocess.run([*program, "--only", "bare", "fast"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "table").read_text() == ended.stdout
    rows = re.findall(r"^\| ([^|]+?) \| [\d.]+ \| [\d.]+ \(", ended.stdout, re.MULTILINE)
    assert rows == ["bare loop", "gpu_slice, trainer=fast"]
    assert "`gpu_slice, trainer=fast`: trainer.fused=true" in ended.stdout
    refused = subprocess.run([*program, "--only", "cat"], capture_output=True, text=True, check=False)
    assert "--only cat: none of bare loop; " in refused.stderr


def test_the_articles_model_gives_our_models_answer() -> None:
    article = benchmark("article")
    torch.manual_seed(0)
    ours, theirs = (kind(ViTOptions(), (1, 28, 28), 10).double() for kind in (ViT, article.ArticleViT))
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


def test_the_benchmark_of_the_time_to_an_accuracy_writes_its_tables(tmp_path: Path) -> None:
    (command,) = (shlex.split(line) for line in COMMANDS if line.startswith("python benchmarks/time_to_accuracy.py"))
    program = [sys.executable, str(REPOSITORY / command[1]), f"--output={tmp_path / 'table'}"]
    small = ["epochs=1", "model.depth=1", "data.dataset.train_size=60", "data.dataset.test_size=20"]
    ended = subprocess.run(
        [*program, "--seeds=1", *small, f"data.root={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "table").read_text() == ended.stdout
    for clock in ("warm", "warm-cache process", "cold process"):
        assert re.search(rf"^\| {clock} \| 1 \| [\d.]+ \| – \|$", ended.stdout, re.MULTILINE)
    refused = subprocess.run([*program, "epohcs=1"], capture_output=True, text=True, check=False)
    assert "epohcs: there is no such key; did you mean 'epochs'?" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_benchmark_of_loading_alone_writes_its_tables(tmp_path: Path) -> None:
    (command,) = (shlex.split(line) for line in COMMANDS if line.startswith("python benchmarks/loaders.py"))
    small = ["--train-size=60", "--batch-size=20", "--epochs=1", f"--root={tmp_path}", f"--output={tmp_path / 'table'}"]
    program = str(REPOSITORY / command[1])
    ended = subprocess.run([sys.executable, program, *command[2:], *small], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "table.md").read_text() == ended.stdout
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("ram", "gpu_slice", "cache", "prefetch of ram", "disk, 0 workers", "DataLoader(sampler=BatchSampler)"):
        assert any(row["candidate"] == name and float(row["epoch_ms"]) > 0 for row in rows), name
    assert "| 10 | 20 | " in ended.stdout


def test_the_benchmark_of_ranks_writes_its_table(tmp_path: Path) -> None:
    program = [
        sys.executable,
        str(REPOSITORY / "benchmarks" / "ranks.py"),
        "--rounds=1",
        "--output",
        tmp_path / "table",
    ]
    few = ["data.dataset.train_size=600", "data.dataset.test_size=20", "model.depth=1", f"data.root={tmp_path}", PLAIN]
    ended = subprocess.run([*program, *few], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "table").read_text() == ended.stdout
    rows = re.findall(r"^\| ([12]) +\| [\d.]+ +\| ([\d.]+) +\|$", ended.stdout, re.MULTILINE)
    assert [count for count, _ in rows] == ["1", "2"]
    assert float(rows[0][1]) == pytest.approx(float(rows[1][1]), abs=1e-4)


def test_what_the_document_on_scale_says_is_what_its_script_prints() -> None:
    program = [sys.executable, str(REPOSITORY / "benchmarks" / "scale.py")]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    document = (REPOSITORY / "docs" / "scale.md").read_text()
    tables = [part for part in printed.split("\n\n") if part.startswith("|")]
    assert len(tables) == 5
    assert all(table.strip() in document for table in tables)
    assert benchmark("scale").simulated_hits(1.0) == benchmark("scale").hit_share(1.0) == 1.0


def test_tensorboard_shows_a_run(tmp_path: Path) -> None:
    assert run_small(["data/loader=ram"], tmp_path, REPOSITORY / "train.py").returncode == 0
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        "outputs",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
            deadline = time.monotonic() + 60
            while b"time/epoch_s" not in (tags := _get(f"{address}data/plugin/scalars/tags")):
                assert time.monotonic() < deadline, tags
                time.sleep(0.5)
        finally:
            server.terminate()


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read()


def test_the_documented_loader_model_and_metric_pass_our_own_tests(tmp_path: Path) -> None:
    for name in ("vitmnist", "conf", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for content in blocks("python", EXTENDING) + blocks("yaml", EXTENDING):
        (tmp_path / content.partition("\n")[0].removeprefix("# ")).write_text(content)
    for content in blocks("diff", EXTENDING):
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=content, text=True, check=True)

    checks = ["tests/test_indexed.py", "tests/test_config.py", "tests/test_loaders.py", "-k", "indexed or every_file"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *checks]
    checked = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout

    experiment = ["-m", "model=mlp", "data/loader=indexed", "hydra.sweep.dir=sweep"]
    assert run_small(experiment, tmp_path, tmp_path / "train.py").returncode == 0
    (folder,) = (path.parent for path in (tmp_path / "sweep").glob("*/result.json"))
    result = result_of(folder)
    assert (result["choices"]["model"], result["choices"]["loader"]) == ("mlp", "indexed")
    confidence = result["epochs"][0]["val_confidence"]
    assert 10 < confidence < 100
    report = (tmp_path / "sweep" / "report.md").read_text()
    assert "confidence, %" in report
    assert f"{confidence:.1f}" in report
    (file,) = folder.glob("events.out.tfevents.*")
    assert "val/confidence" in EventAccumulator(str(file)).Reload().Tags()["scalars"]


def test_the_readmes_loop_learns(tmp_path: Path) -> None:
    (loop,) = (content for content in blocks("python") if "optimizer.step()" in content)
    ended = run_program(loop, tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = (float(line.split()[-1]) for line in ended.stdout.splitlines())
    assert second < first < 0.6


def run_program(content: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", content], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert len(pictures) >= 3
    for picture in pictures:
        assert (REPOSITORY / picture).read_bytes().startswith(b"\x89PNG")
