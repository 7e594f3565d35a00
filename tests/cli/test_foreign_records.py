"""What a run folder or checkpoint of somebody else says is data: it starts nothing, and names no secret."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import CallHere, Printed, Train
from vitmnist.cli import evaluate, report, status


def popen(marker: Path) -> str:
    """An override that would create a file when Hydra instantiates it."""
    return f"+hydra.callbacks.x={{_target_:psutil.Popen,args:[touch,{marker}]}}"


def make_hostile(folder: Path, lines: list[str], marker: Path) -> None:
    """Add overrides to the record of a run, and to its configuration a section that Hydra would instantiate."""
    overrides, config = (folder / ".hydra" / f"{name}.yaml" for name in ("overrides", "config"))
    overrides.write_text(yaml.safe_dump([*yaml.safe_load(overrides.read_text()), *lines]))
    target = {"_target_": "psutil.Popen", "args": ["touch", str(marker)]}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"hydra": {"callbacks": {"x": target}}}))


def test_a_copied_run_executes_nothing(runs: Path, succeed: Printed, tmp_path: Path) -> None:
    folder, marker = shutil.copytree(runs / "cut", tmp_path / "run"), tmp_path / "marker"
    make_hostile(folder, [popen(marker), "--help"], marker)
    assert "Configuration groups" not in succeed("resume=run", "max_minutes=null")
    assert not marker.exists()


def test_a_secret_that_a_record_names_is_never_printed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Train, call_here: CallHere
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    shutil.copytree(runs / "cut", tmp_path / "cut")
    file = tmp_path / "cut" / ".hydra" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"device": "${oc.env:SECRET}"}))
    (tmp_path / "cut" / "result.json").unlink()
    ended = [
        train_here("resume=cut"),
        call_here(evaluate.main, "cut"),
        call_here(report.main, "."),
        call_here(status.main, "."),
    ]
    assert "error: device=${oc.env:SECRET}: unknown device" in ended[0].stderr
    assert "hunter2" not in "".join(process.stdout + process.stderr for process in ended)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
