"""A run writes into its own folder only, and a start that was refused is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Train
from vitmnist.errors import DataError
from vitmnist.tracking.runs import find_runs


@pytest.mark.parametrize("name", ["checkpoints", ".hydra", "vitmnist.log"])
def test_a_link_in_a_copied_folder_is_refused(name: str, quick: list[str], train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, "max_minutes=0", "hydra.run.dir=run").returncode
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run" / name).rename(elsewhere)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    before = {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.glob("*"))}
    ended = train_here("resume=run", "max_minutes=null")
    assert ended.stderr == f"error: run/{name}: is a symbolic link; replace it by what it points to\n"
    assert {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.glob("*"))} == before


def test_a_start_that_was_refused_is_not_listed(quick: list[str], train_here: Train, tmp_path: Path) -> None:
    assert train_here(*quick, f"data.root={tmp_path / 'nowhere'}", "hydra.run.dir=run").returncode == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "vitmnist.log"}
    with pytest.raises(DataError, match="contains no runs"):
        find_runs([tmp_path])
