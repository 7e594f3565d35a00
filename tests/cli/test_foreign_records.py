"""The content of somebody else's run folder is data: it starts nothing, and reveals no secret."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import CallHere, Printed, Train


def test_a_copied_run_executes_nothing(runs: Path, succeed: Printed, tmp_path: Path) -> None:
    """An override and a section of the configuration would create a file if Hydra instantiated them."""
    folder, marker = shutil.copytree(runs / "cut", tmp_path / "run"), tmp_path / "marker"
    overrides, config = (folder / ".hydra" / f"{name}.yaml" for name in ("overrides", "config"))
    typed = [f"+hydra.callbacks.x={{_target_:psutil.Popen,args:[touch,{marker}]}}", "--help"]
    overrides.write_text(yaml.safe_dump([*yaml.safe_load(overrides.read_text()), *typed]))
    target = {"_target_": "psutil.Popen", "args": ["touch", str(marker)]}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"hydra": {"callbacks": {"x": target}}}))
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
    programs = ("evaluate", "cut"), ("report", "."), ("status", ".")
    ended = [train_here("resume=cut"), *(call_here(*program) for program in programs)]
    assert "error: device=${oc.env:SECRET}: unknown device" in ended[0].stderr
    assert "hunter2" not in "".join(process.stdout + process.stderr for process in ended)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
