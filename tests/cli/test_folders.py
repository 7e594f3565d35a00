"""Only a folder that this command created and did not use is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.folders import OutputFolder


def output(folder: Path, is_sweep: bool = False) -> OutputFolder:
    config = OmegaConf.create({"hydra": {"run": {"dir": str(folder)}, "sweep": {"dir": str(folder)}}, "resume": None})
    assert isinstance(config, DictConfig)
    return OutputFolder(config, is_sweep, resumes=False)


@pytest.mark.parametrize("content", [[], ["rank-1.log"], ["notes.txt"]])
def test_a_folder_that_was_there_before_stays(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).touch()
    output(tmp_path).end_failed(has_begun=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == content


def test_a_new_folder_goes_with_its_empty_parents(tmp_path: Path) -> None:
    output(tmp_path / "date" / "time").end_failed(has_begun=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", ["0", "vit/0"])
def test_a_failing_sweep_keeps_the_records_of_its_jobs(tmp_path: Path, job: str) -> None:
    sweep = output(tmp_path / "sweep", is_sweep=True)
    (tmp_path / "sweep" / job).mkdir(parents=True)
    (tmp_path / "sweep" / job / "result.json").touch()
    sweep.end_failed(has_begun=False)
    assert (tmp_path / "sweep" / job / "result.json").exists()
