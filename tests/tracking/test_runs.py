"""Reading records: one that cannot be read is a row that says why, and stops no report."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import compared, epoch, rows, run
from vitmnist.cli import status
from vitmnist.errors import DataError
from vitmnist.report.grouping import compare
from vitmnist.report.table import as_csv
from vitmnist.report.write import as_markdown, as_text
from vitmnist.tracking.result import Result
from vitmnist.tracking.runs import Run, find_runs, read_run


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\0\0\0\0", "is not JSON: Expecting value"),
        (b"{}", "is not the result of a run"),
        ({"status": "done"}, "is not the result of a run"),
    ],
)
def test_what_cannot_be_read_is_a_row_with_the_reason(content: Any, reason: str, tmp_path: Path) -> None:
    run(tmp_path / "0")
    for name in ("1", "2"):
        file = run(tmp_path / name, "disk") / "result.json"
        changed = json.dumps(json.loads(file.read_text()) | content).encode() if isinstance(content, dict) else content
        file.write_bytes(changed)
    found = [row["status"] for comparison in compared(tmp_path) for row in rows(comparison)]
    assert found[0] == "completed"
    assert [status.startswith(f"unreadable: {n}/result.json: {reason}") for n, status in enumerate(found)] == [
        *(False, True, True)
    ]


def test_text_of_a_foreign_record_is_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control characters are escaped, and its interpolations are not resolved."""
    monkeypatch.setenv("TOKEN", "secret-4711")
    odd = {"key": "\x1b[31mred\x9b", "token": "${oc.env:TOKEN}"}
    run(tmp_path / "0", config={"key": "a", "token": "b"})
    bad = run(tmp_path / "1\x1b[2J", config=odd, status="failed", error="\x1b[31m")
    assert (bad / ".hydra" / "config.yaml").is_file()
    for has_result in (True, False):
        if not has_result:
            (bad / "result.json").unlink()
        comparisons = compared(tmp_path)
        table, text = as_csv(comparisons), as_text(comparisons) + as_markdown(comparisons)
        assert list(csv.DictReader(io.StringIO(table)))[1]["token"] == "${oc.env:TOKEN}"
        assert text.replace("\n", "").isprintable()
        assert "secret" not in table + text
        shown = status.row(read_run(bad), 0.0)
        assert shown["run"].endswith("1\\x1b[2J")
        assert all(map(str.isprintable, shown.values()))


def test_pipes_in_place_of_records_stop_no_command(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    for name in ("result.json", "epochs.csv", ".hydra/config.yaml"):
        os.mkfifo(tmp_path / name)
    found = read_run(tmp_path)
    assert status.row(found, 0.0)["state"] == "not started"


@pytest.mark.timeout(60)  # quadratic work takes minutes
def test_60_000_epochs_are_summarised_and_compared() -> None:
    epochs, figures = [], [3.0, 1.0, 2.0]
    result = Result(overrides=[], choices={}, epochs=epochs)
    for number in range(60_000):
        epochs.append(epoch(figures[number % 3], eval_acc=number / 600, first_of_start=number == 7))
    summary = result.summary()
    assert (summary["epoch_s_median"], summary["eval_acc_best"]) == (2.0, 59_999 / 600)
    content = {"epochs": epochs, "began_at": 0.0, "ended_at": 0.0, "environment": {"host": "a"}}
    report = [
        Run(Path(f"{number}"), "completed", "", {"data.loader.name": loader, "seed": 1}, content)
        for number, loader in enumerate(("ram", "disk"))
    ]
    text = as_text(compare(report))
    assert "same training and evaluation losses, to the last bit, in all 60000 epochs" in text


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, "contains no runs"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(DataError, match=problem):
            find_runs([folder])
    for number in (10, 9, 2):
        run(tmp_path / "sweep" / f"{number}-x")
    found = find_runs([tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "9-x"])
    assert [one.name for one in found] == ["2-x", "9-x", "10-x"]
