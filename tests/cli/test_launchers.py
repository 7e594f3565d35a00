"""Sweeps whose jobs run elsewhere, by the launchers that exist for Hydra: the same answer, and times are marked."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, result_of, start_program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "module"),
    [("parallel", "joblib_launcher"), ("submitit", "submitit_launcher")],
)
def test_two_jobs_at_once_end_in_one_report(launcher: str, module: str, tiny_root: Path, tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{module}")
    data = ["data/dataset=kmnist", f"data.root={tiny_root}", "batch_size=12", "model=cnn", "epochs=80", PLAIN]
    typed = ["-m", f"hydra/launcher={launcher}", *data, "seed=1,2", "hydra.sweep.dir=here"]
    ended = start_program(tmp_path, *typed)
    assert ended.returncode == 0, ended.stderr
    results = [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-9]-*"))]
    assert [(result["status"], result["seed"], len(result["epochs"])) for result in results] == [
        ("completed", 1, 80),
        ("completed", 2, 80),
    ]
    rows = list(csv.DictReader((tmp_path / "here" / "report.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["completed, overlapping"]
    assert "completed, overlapping" in ended.stdout
    again = start_program(tmp_path, *typed, "resume=auto")
    assert again.returncode == 0, again.stderr
    assert [result_of(folder) for folder in sorted((tmp_path / "here").glob("[0-9]-*"))] == results


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path) -> None:
    """`parallel` is ours, built on the plugin's."""
    start = "import sys; sys.modules['hydra_plugins'] = None; from vitmnist.cli.train import main; main()"
    program = [sys.executable, "-c", start, "-m", "hydra/launcher=parallel"]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "error: hydra/launcher=joblib is not installed; type pip install 'vitmnist[launchers]'\n"
    assert not list(tmp_path.iterdir())
