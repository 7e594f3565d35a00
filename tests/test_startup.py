"""A start imports what it needs and nothing else; importing takes most of the time of a short run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from vitmnist.cli.main import main; sys.argv = ['train.py', *{arguments}]; main()"


def imported(program: str, folder: Path) -> set[str]:
    """The modules that a program has imported at its end."""
    ending = "\nimport sys\nopen('modules.txt', 'w').write('\\n'.join(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program + ending], cwd=folder, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return set((folder / "modules.txt").read_text().splitlines())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import vitmnist.cli.main", ["torch", "matplotlib", "tensorboard", "PIL"]),
        (
            "from vitmnist import make_loader, load_dataset",
            ["torch._dynamo", "torchvision", "matplotlib", "tensorboard", "hydra"],
        ),
        ("import vitmnist.run", ["torch._dynamo", "torchvision", "matplotlib", "hydra"]),
    ],
)
def test_an_import_leaves_out_what_it_does_not_need(statement: str, absent: list[str], tmp_path: Path) -> None:
    assert not imported(statement, tmp_path) & set(absent)


def test_a_run_with_images_imports_neither_matplotlib_nor_torchvision(quick: list[str], tmp_path: Path) -> None:
    arguments = [*quick, "data/dataset=mnist", "data.dataset.train_size=60", "data.dataset.test_size=20", "epochs=1"]
    arguments = [argument for argument in arguments if not argument.startswith("tensorboard")]
    modules = imported(RUN.format(arguments=arguments), tmp_path)
    assert "tensorboard" in modules
    assert not modules & {"matplotlib", "torchvision", "markdown"}


@pytest.mark.parametrize("arguments", [["--version"], ["-sc", "query=bash"]], ids=" ".join)
def test_version_and_tab_completion_answer_without_torch(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", "vitmnist data/loader=g")
    assert "torch" not in imported(RUN.format(arguments=arguments), tmp_path)
