"""Extensions in an installed package: the project of docs/own-project.md, and members found by entry points."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import PLAIN, result_of
from tests.support.pages import blocks, write_block
from tests.support.pictures import write_pictures
from tests.support.processes import REPOSITORY, run_python
from vitmnist.losses import LOSSES

PAGE = REPOSITORY / "docs" / "own-project.md"
EXTRA = """
import sys
from dataclasses import dataclass

from torch import nn

from vitmnist.metrics import METRICS, BatchMetricInfo, ConfusionMetricInfo
from vitmnist.registry import NoOptions
from vitmnist.tracking.loggers import LOGGERS, Logger

print("extra is imported", file=sys.stderr)


@METRICS.register("top2", info=BatchMetricInfo(unit="%", tag="top2", direction="max", column="top-2 accuracy, %"))
def top2(logits, labels):
    return (logits.topk(2, dim=1).indices == labels[:, None]).sum()


@METRICS.register("images", info=ConfusionMetricInfo(unit="", tag="images", direction="max"))
def images(matrix):
    return matrix.sum()


@LOGGERS.register("lines")
class Lines(Logger):
    def __init__(self, options, folder, result):
        self.path = folder / "lines.txt"

    def add_epoch(self, record):
        with self.path.open("a") as file:
            print(sorted(record), file=file)
"""


COMMANDS = """
import json, sys
from vitmnist import load_dataset, make_loader
from vitmnist.__main__ import main

for typed in json.loads(sys.argv[1]):
    print(*typed, file=sys.stderr)
    sys.argv = ["vitmnist", *typed]
    code = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    assert bool(code) == ("hydra.run.dir=wrong" in typed), code
"""  # one process, because importing torch and timm takes most of the time


def program(folder: Path, site: Path, *arguments: str, module: str = "vitmnist") -> subprocess.CompletedProcess[str]:
    """Run the program in a folder, with the packages that are installed in `site`."""
    return run_python("-m", module, *arguments, folder=folder, PYTHONPATH=f"{REPOSITORY}{os.pathsep}{site}")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The documented project."""
    for name in ("leaves", "conf/model", "conf/loss"):
        (tmp_path / name).mkdir(parents=True)
    for language in ("toml", "python", "yaml"):
        for block in blocks(language, PAGE):
            write_block(tmp_path, block)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_documented_project_trains_sweeps_resumes_evaluates_predicts_and_exports(project: Path) -> None:
    pytest.importorskip("timm")
    install = ["pip", "install", "--no-deps", "--no-build-isolation", "--target", project / "site", project]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    for name in ("oak", "elm"):
        for path in write_pictures(project / "pictures" / name, 15).glob("*/*"):
            path.rename(project / "pictures" / name / path.name)
    (lines,) = blocks("sh", PAGE)
    commands = [shlex.split(line)[1:] for line in lines.splitlines()]
    default = project / "conf" / "model" / "resnet.yaml"
    default.write_text(default.read_text().replace("resnet18", "test_resnet"))  # smaller, for the sweep too
    for typed in commands:
        if "--config-dir" in typed:
            typed.extend(["epochs=1", "batch_size=12", PLAIN, f"data.root={project / 'data'}"])
    commands.append(["train", "--config-dir", "conf", "--help"])
    (project / "commands.py").write_text(COMMANDS)
    ended = program(project, project / "site", json.dumps(commands), module="commands")
    assert ended.returncode == 0, ended.stderr
    assert "cannot be imported" not in ended.stderr
    assert "model: cnn, resnet, timm, torchvision, vit" in ended.stdout
    first = result_of(project / "runs" / "first")
    assert (first["config"]["model"]["name"], first["config"]["loss"]["name"]) == ("resnet", "focal")
    assert len(first["epochs"]) == 7
    rows = list(csv.DictReader((project / "runs" / "sweep" / "report.csv").read_text().splitlines()))
    assert [row["status"].partition(",")[0] for row in rows] == ["completed"] * 4


def test_the_focal_loss_is_its_formula(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    with LOSSES.temporarily():  # Later tests in this process must not find the loss.
        from leaves.focal import focal_loss  # type: ignore[import-not-found]
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 2, 1, -100])
    p = logits.softmax(dim=1)[range(3), labels[:3]]
    expected = -((1 - p) ** 2 * p.log()).sum()
    assert torch.allclose(focal_loss(logits, labels, 2.0), expected)
    probabilities = F.one_hot(labels[:3], 3).float()
    assert torch.allclose(focal_loss(logits[:3], probabilities, 2.0), expected)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with two installed packages; one of them cannot be imported."""
    folder = tmp_path / "site"
    for name, content in (("extra", EXTRA), ("broken", "import nowhere\n")):
        (folder / f"{name}_package-1.dist-info").mkdir(parents=True)
        (folder / f"{name}.py").write_text(content)
        (folder / f"{name}_package-1.dist-info" / "METADATA").write_text(f"Name: {name}-package\nVersion: 1\n")
        points = f"[vitmnist.members]\n{name} = {name}\n"
        (folder / f"{name}_package-1.dist-info" / "entry_points.txt").write_text(points)
    return folder


def test_installed_members_are_found_when_they_are_needed_and_broken_packages_named(
    quick: list[str], site: Path, tmp_path: Path
) -> None:
    trained = [*quick, "monitor=top2", "logger=[lines]", "hydra.run.dir=run"]
    (tmp_path / "commands.py").write_text(COMMANDS)
    wrong = [*quick, "logger=[lines,linse]", "hydra.run.dir=wrong"]
    commands = [trained, ["evaluate", "run"], ["report", "run", "--output", "out"], wrong]
    ended = program(tmp_path, site, json.dumps(commands), module="commands")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    refusal = "error: logger.1.name=linse: not known; did you mean 'lines'? allowed: "
    assert refusal in ended.stderr
    assert ended.stderr.count("extra is imported") == 1
    assert ended.stderr.startswith(trained[0]), "nothing is imported before the first command"
    reason = "broken of the package broken-package cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    assert [line.count("error: ") for line in (ended.stdout + ended.stderr).splitlines() if reason in line] == [0, 1]
    (epoch, _) = result_of(tmp_path / "run")["epochs"]
    assert {"train_top2", "eval_top2", "eval_images"} <= epoch.keys()
    assert epoch["eval_images"] == 7
    assert (tmp_path / "run" / "lines.txt").read_text().count("eval_top2") == 2
    assert not list((tmp_path / "run").glob("*tfevents*")), "no logger but those that are named"
    assert "eval_top2" in (tmp_path / "run" / "epochs.csv").read_text()
    assert ("images 7.0000" in ended.stdout, f"top2 {epoch['eval_top2']:.2f}%" in ended.stdout) == (True, True)
    assert "top-2 accuracy" in ended.stdout
    without = program(tmp_path, tmp_path, "report", "run", "--output", "other")
    assert without.returncode == 0, without.stderr
