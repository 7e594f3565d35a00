"""How runs are found, and how their records are printed."""

from pathlib import Path

import pytest

from tests.conftest import CallHere
from tests.support.records import write_run
from vitmnist.errors import DataError
from vitmnist.tracking.runs import find_runs


@pytest.mark.needs("POSIX files")
def test_control_characters_of_a_record_are_escaped_where_they_are_printed(tmp_path: Path, call_here: CallHere) -> None:
    write_run(tmp_path / "1\x1b[2J", config={"title": "\x9b"}, status="failed", error="\x1b[31mred", device="\ud800")
    write_run(tmp_path / "2", device="cpu")
    for command in ("report", "status"):
        printed = call_here(command, ".").stdout
        assert r"\x1b[" in printed
        assert printed.replace("\n", "").isprintable()


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, "contains no runs"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(DataError, match=problem):
            find_runs([folder])
    for index in (10, 9, 2):
        write_run(tmp_path / "sweep" / f"{index}-x")
    folders = find_runs([tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "9-x"])
    assert [folder.name for folder in folders] == ["2-x", "9-x", "10-x"]
