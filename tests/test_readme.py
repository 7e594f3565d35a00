"""The commands, examples and links in the README and in `docs/` work as they stand."""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torchvision import datasets as torchvision_datasets

from tests.conftest import BRIEF, PLAIN, REPOSITORY, Train, result_of, start_program
from tests.support.cifar import write_cifar
from tests.support.pages import apply_diff, blocks, write_block
from tests.support.processes import TrainProcess, run_python
from vitmnist.__main__ import main
from vitmnist.models.vit import ViT, ViTOptions

README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "benchmarks" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES += [REPOSITORY / "CONTRIBUTING.md"]
FEW = ["epochs=1", "data.dataset.train_size=40", "data.dataset.test_size=20", "data.root=data"]
IMAGES = ["--train-size=60", "--batch-size=20", "--root=data"]
# Sweeps of many jobs; tests/cli/test_sweep.py has one.
LONG = ("experiment=loaders", "experiment=smoke", "repeats=")
BENCHMARKS = {  # script: arguments that make it take seconds, the first cells of its table
    "epoch": ([*IMAGES, "--rounds=1", "--only", "bare", "fast"], ["bare loop", "gpu_slice, trainer=fast"]),
    "loaders": ([*IMAGES, "--rounds=1"], ["plain loop x[permutation[i:j]]", "ram", "gpu_slice", "cache"]),
    "step": (["--rounds=1", "--seconds=0.01", "--batch-size=4", "--root=data", "--only=fp32, eager"], ["fp32, eager"]),
    "pictures": (
        ["--folder=files", "--pictures=70", "--batches=1", "--sides=8", "--rounds=1"],
        ["decoding alone, 1 thread", "`disk`", "torchvision v2 per sample", "`ram`, `imagenet`"],
    ),
    "startup": (["--rounds=1", "--only=--cfg"], ["`import torch`", "`train.py --cfg job`"]),
    "time_to_accuracy": (["--seeds=1", "model.depth=1", *FEW], ["warm", "warm-cache process", "cold process"]),
}


def commands(start: str, *pages: Path) -> list[list[str]]:
    """The arguments of every command in a bash block of some pages (default: all), each once; `A && B` is two."""
    text = "".join(block for page in pages or PAGES for block in blocks("bash", page)).replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    parts = dict.fromkeys(part.strip() for line in lines for part in line.split("&&"))
    return [shlex.split(part.partition(" > ")[0])[len(start.split()) :] for part in parts if part.startswith(start)]


def draw(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((30, 20), 64).save(file)


def small(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with few images and one repeat, and with the image files that they name."""
    if "data.dataset.path=pictures" in arguments:
        draw(*(folder / "pictures" / f"class {number % 2}" / f"{number}.png" for number in range(110)))
    if "experiment=flowers" in arguments:
        (experiment,) = blocks("yaml", REPOSITORY / "docs" / "command-line.md")
        file = folder / "mine" / "experiment" / "flowers.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(experiment)
        draw(*(folder / "flowers" / f"class {number % 2}" / f"{number}.png" for number in range(110)))
    few = [] if {"--help", "--cfg"} & set(arguments) else [*FEW, PLAIN, "repeats=1"]
    few += ["batch_size=20"] if "experiment=smoke" in arguments else []  # half of its jobs
    is_timed = {"data/loader=auto", "experiment=pictures"} & set(arguments)
    return [*arguments, *few, *(BRIEF if is_timed else [])]


def is_slow(arguments: list[str]) -> bool:
    """Whether it is none of the README's short commands."""
    return arguments not in commands("python train.py", README) or any(word in " ".join(arguments) for word in LONG)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, marks=[pytest.mark.slow] * is_slow(arguments))
        for arguments in commands("python train.py")
    ],
    ids=" ".join,
)
def test_documented_train_commands_run(
    arguments: list[str], train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if "data/dataset=cifar10" in arguments:
        write_cifar(tmp_path / "data", torchvision_datasets.CIFAR10, 100, monkeypatch)
    # A launcher leaves its pool of processes to the process that used it.
    has_launcher = any("launcher" in argument for argument in arguments)
    ended = (partial(start_program, tmp_path) if has_launcher else train_here)(*small(arguments, tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_documented_torchrun_command_trains_in_two_processes(tmp_path: Path) -> None:
    (arguments,) = commands("torchrun")
    launcher = ["-m", "torch.distributed.run", "--standalone", arguments[0], REPOSITORY / "train.py"]
    ended = run_python(*launcher, *small(arguments[2:], tmp_path), folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (result,) = tmp_path.glob("outputs/runs/*/*/result.json")
    assert result_of(result.parent)["distributed"] == {"ranks": 2}


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
    # tests/diagnosis/test_stories.py runs the command on a script.
    [
        pytest.param(arguments, marks=pytest.mark.slow if "onnx" in arguments else ())
        for arguments in commands("vitmnist")
        if arguments[0] != "diagnose"
    ],
    ids=" ".join,
)
def test_documented_commands_on_a_trained_run_work(
    arguments: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "onnx" in arguments:
        pytest.importorskip("onnxruntime")
    (run,) = trained.glob("outputs/runs/*/*")
    monkeypatch.chdir(trained)
    typed = [str(run) if argument == "RUN" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["vitmnist", *typed])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with suppress(SystemExit):
        main()
    assert capsys.readouterr().out  # nothing but the reason, on stderr, if it failed


def test_tensorboard_shows_a_run(trained: Path) -> None:
    (arguments,) = commands("tensorboard")
    ended = run_python("-m", "tensorboard.main", *arguments, "--inspect", folder=trained)
    assert "time/epoch_s" in ended.stdout, ended.stderr


def test_every_documented_command_is_one_of_those_tested() -> None:
    programs = ["python train.py", "torchrun", "vitmnist", "tensorboard", "pip install", "pytest"]
    programs += ["pre-commit"]
    programs += [f"python benchmarks/{name}.py" for name in [*BENCHMARKS, "gpu"]]
    assert len(commands("")) == sum(len(commands(program)) for program in programs)
    assert README.read_text().count("&& pytest\n") == 1  # CI runs this line


def test_readme_training_loop_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop,) = blocks("python", README)
    monkeypatch.chdir(tmp_path)
    exec(loop, {})
    first, second = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert second < first < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS)
def test_benchmarks_write_their_table(script: str, tmp_path: Path) -> None:
    documented = next(iter(commands(f"python benchmarks/{script}.py")), [])
    small, rows = BENCHMARKS[script]
    program = REPOSITORY / "benchmarks" / f"{script}.py"
    ended = run_python(program, *documented, "--output=table", *small, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (table,) = (file.read_text() for file in (tmp_path / "table", tmp_path / "table.md") if file.exists())
    assert table == ended.stdout
    assert set(rows) <= set(re.findall(r"^\| +(\S.*?) +\| +\d", table, re.MULTILINE))


def test_the_model_of_the_benchmarks_is_equal_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    article = importlib.import_module("article")
    ours, theirs = (kind(ViTOptions(), (1, 28, 28), 10).double() for kind in (ViT, article.ArticleViT))
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


def headings(file: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_code_blocks_are_valid_and_links_lead_to_a_file_and_a_heading() -> None:
    for page in PAGES:
        for block in blocks("python", page):
            ast.parse(block)
        for block in blocks("yaml", page):
            yaml.safe_load(block)
        subprocess.run(["bash", "-n", "-c", "\n".join(blocks("bash", page))], check=True)
        for text, target in re.findall(r"\[([^\]]*)\]\(((?!https:)[^)]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            assert not anchor or anchor in headings(file), target
            if file.suffix == ".py" and (symbol := re.fullmatch(r"`(\w+)`", text)):
                defined = rf"^\s*(def|class) {symbol[1]}\b|^{symbol[1]}\b.* = "
                assert re.search(defined, file.read_text(), re.MULTILINE), f"{symbol[1]} is not in {target}"


def extended_copy(folder: Path) -> Path:
    """A copy of the project with the examples of docs/architecture.md."""
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".*_cache", "outputs")
    shutil.copytree(REPOSITORY, folder, ignore=ignored, dirs_exist_ok=True)
    page = REPOSITORY / "docs" / "architecture.md"
    for content in blocks("python", page) + blocks("yaml", page):
        if content.startswith("# "):
            write_block(folder, content)
    for diff in blocks("diff", page):
        apply_diff(folder, diff)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_documented_examples_pass_our_own_tests(tmp_path: Path) -> None:
    """Which check, besides the contract of a loader, that nothing takes today's members for all there are."""
    folder = extended_copy(tmp_path)
    parts = ["config", "models", "optim", "loaders/test_base.py", "loaders/test_auto.py", "training/test_waits.py"]
    parts += ["training/test_loop.py", "cli/test_main.py", "test_api.py"]
    tests = [f"tests/{part}" for part in parts]
    layers = ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    for check in (layers, ("-m", "pytest", "-q", *tests)):
        checked = run_python(*check, folder=folder, timeout=800, PYTHONPATH=str(folder))
        assert checked.returncode == 0, checked.stdout[-5000:]


@pytest.mark.slow
def test_the_documented_examples_are_trained(tmp_path: Path) -> None:
    folder = extended_copy(tmp_path)
    members = ["model=mlp", "data/dataset=stripes", "data/loader=indexed", "logger=[tensorboard,json_lines]"]
    members += ["data/augment=compose", "data.augment.operations=[{name: invert, p: 0.2}]"]
    members += ["data/sampler=shuffled_once"]
    ended = run_python(
        "train.py", *small([*members, "hydra.run.dir=run"], folder), folder=folder, PYTHONPATH=str(folder)
    )
    assert ended.returncode == 0, ended.stderr
    result = result_of(folder / "run")
    config = result["config"]
    assert (config["model"]["name"], config["data"]["loader"]["name"]) == ("mlp", "indexed")
    assert config["data"]["sampler"] == {"name": "shuffled_once"}
    assert result["epochs"][0]["eval_acc"] <= result["epochs"][0]["eval_top5"] <= 100
    assert "eval_top5" in (folder / "run" / "epochs.csv").read_text()
    assert len((folder / "run" / "epochs.jsonl").read_text().splitlines()) == 1
