"""Runs are compared with those that they may be compared with; repeats are one row."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.support.records import DATASET, compared, epoch, rows, run, the_only
from vitmnist.report.summary import overlapping, summary
from vitmnist.report.table import articles_table, as_csv
from vitmnist.report.text import seconds
from vitmnist.report.write import as_markdown, as_text

TRAINERS = ("plain", "fast")


def job(folder: Path, began: float, ended: float, host: str | None = "here", **result: Any) -> None:
    """A job whose epochs, after the first, span its time."""
    ends = [epoch(0.0001, ended_at=began), epoch(ended - began, ended_at=ended)]
    what = {"config": {"seed": int(folder.name)}, "epochs": ends, **result}
    run(folder, environment={"host": host}, began_at=began, ended_at=ended, **what)


def test_jobs_that_overlapped_on_one_machine_are_marked_and_not_ranked(tmp_path: Path) -> None:
    """Also one that failed before its first epoch was over; a job of another machine slows none down."""
    job(tmp_path / "0", 1000.0, 1020.0)
    job(tmp_path / "1", 1019.0, 1030.0, epochs=[], status="failed", error="of something")
    job(tmp_path / "2", 1050.0, 1070.0)
    job(tmp_path / "3", 1000.0, 1020.0, "there")
    job(tmp_path / "4", 1000.0, 1020.0, None)
    here, there, unknown = compared(tmp_path)
    assert rows(here)[0]["status"] == "failed 1 of 3: of something; overlapping 2 of 3"
    assert [len(row.ranked) for row in (*here.rows, *there.rows, *unknown.rows)] == [1, 1, 1]
    assert overlapping(here).startswith("2 runs overlapped with another run on the same machine")
    assert not overlapping(there)


def test_a_resumed_job_was_not_active_while_it_was_stopped(tmp_path: Path) -> None:
    """Its active times are known by the epochs before, and by the times since it was resumed."""
    job(tmp_path / "0", 2000.0, 2011.0, epochs=[epoch(10.0, ended_at=1010.0), epoch(10.0, ended_at=2010.0)])
    job(tmp_path / "1", 1500.0, 1510.0)
    assert not overlapping(the_only(tmp_path))
    job(tmp_path / "2", 1005.0, 1006.0)
    assert overlapping(the_only(tmp_path)).startswith("2 runs")


def test_the_number_of_processes_is_a_column(tmp_path: Path) -> None:
    run(tmp_path / "0")
    run(tmp_path / "1", distributed={"ranks": 2})
    comparison = the_only(tmp_path)
    assert comparison.columns == ("processes",)
    assert [row.values for row in comparison.rows] == [("–",), ("2",)]


def test_what_varies_makes_the_columns_whatever_it_is(tmp_path: Path) -> None:
    run(tmp_path / "0", "ram", config={"data.root": "/a", "seed": 1})
    run(tmp_path / "1", "disk", config={"data.root": "/b", "data.loader.num_workers": 2, "repeat": 2})
    assert the_only(tmp_path).columns == ("data/loader",)  # num_workers is of disk alone
    run(tmp_path / "2", "disk", config={"model.depth": 3, "seed": 7})
    assert set(the_only(tmp_path).columns) == {"data/loader", "model.depth", "data.loader.num_workers"}
    assert rows(the_only(tmp_path))[2]["model.depth"] == "3"


def test_trainers_are_told_apart_by_what_one_types(tmp_path: Path) -> None:
    plain, fast = (yaml.safe_load((REPOSITORY / "conf" / "trainer" / f"{name}.yaml").read_text()) for name in TRAINERS)
    run(tmp_path / "0", config={"trainer": plain})
    run(tmp_path / "1", config={"trainer": fast})
    run(tmp_path / "2", config={"trainer": {**plain, "fused": True, "micro_batch": 250}})
    run(tmp_path / "3", config={"trainer": {**fast, "precision": "fp32"}})
    labels = [row["trainer"] for row in rows(the_only(tmp_path))]
    assert labels == ["plain", "fast", "plain, micro_batch=250, fused=true", "fast, precision=fp32"]


def test_a_run_contributes_the_median_of_its_steady_epochs(tmp_path: Path) -> None:
    run(tmp_path / "0-a", times=(9.0, 2.0, 4.0, 3.0))
    run(tmp_path / "1-b", "disk", times=(12.0,))
    ram, disk = rows(the_only(tmp_path))
    assert (ram["epoch, s"], ram["training, s"], ram["waiting, s"], ram["waiting, %"]) == (
        "3.00",
        "2.40",
        "0.600",
        "25.0",
    )
    assert (ram["images/s"], ram["accuracy, %"], ram["host, MiB"]) == ("25", "90.00", "700")
    assert (disk["epoch, s"], disk["status"]) == ("12.0", "completed, first epoch only")
    assert not {"GPU, MiB", "GPU busy, %", "× fastest", "range", "runs", "saving, s"} & ram.keys()  # empty in all rows


def test_repeats_and_seeds_are_one_row_of_as_many_runs(tmp_path: Path) -> None:
    for number, time in enumerate((2.0, 6.0, 3.0)):
        run(tmp_path / str(number), times=(9.0, time, time), config={"repeat": number + 1, "seed": number})
    run(tmp_path / "3", "disk", times=(9.0, 8.0), config={"seed": 0})
    ram, disk = rows(the_only(tmp_path))
    assert (ram["runs"], ram["epoch, s"], ram["range"]) == ("3", "3.00", "2.00–6.00")
    assert (disk["runs"], disk["range"], disk["× fastest"]) == ("1", "–", "4.00, single round")


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_the_articles_layout_has_batch_sizes_down_and_loaders_across(seeds: tuple[int, ...], tmp_path: Path) -> None:
    cells = [("disk", 1000, 8.0), ("disk", 300, 9.0), ("ram", 1000, 4.0), ("ram", 300, 5.0)]
    for number, (loader, size, time) in enumerate(cells):
        for seed in seeds:
            run(tmp_path / f"{number}-{seed}", loader, size, (10.0, time), config={"seed": seed})
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "result.json").write_text("null")
    assert articles_table(the_only(tmp_path)) == (
        ["batch size", "disk", "ram"],
        [["300", "9.00", "**5.00**"], ["1,000", "8.00", "**4.00**"]],
    )
    run(tmp_path / "4", "ram", 300, config={"model.depth": 3})
    assert articles_table(the_only(tmp_path)) == ([], [])


def unfinished(folder: Path, left: str) -> None:
    """A run of disk that has left a file, and no result."""
    (run(folder, "disk") / "result.json").unlink()
    (folder / left).touch()


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda f: run(f, "disk", status="failed", error="out of memory | <b>", epochs=[]), "failed: out of memory"),
        (lambda f: run(f, "disk", status="interrupted", error="SIGTERM"), "interrupted: SIGTERM"),
        (lambda f: unfinished(f, ".lock"), "killed: it left no result.json"),
        (lambda f: unfinished(f, "vitmnist.log"), "not begun"),
        (lambda f: (run(f, "disk") / "result.json").write_text("{"), "unreadable: 1/result.json: "),
        (lambda f: (run(f, "disk") / "resumed.yaml").touch(), "completed, resumed"),
    ],
)
def test_a_run_that_did_not_complete_has_a_row_that_says_why(make: Any, status: str, tmp_path: Path) -> None:
    run(tmp_path / "0")
    make(tmp_path / "1")
    comparisons = compared(tmp_path)
    found = [row for comparison in comparisons for row in rows(comparison)]
    assert [row["data/loader"] for row in found] == ["ram", "disk"]
    assert found[0]["status"] == "completed"
    assert found[1]["status"].startswith(status)
    assert status in as_text(comparisons)
    assert "<b>" not in as_markdown(comparisons)


def test_each_reason_is_counted_and_only_completed_runs_are_ranked(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"repeat": 1})
    run(tmp_path / "1", config={"repeat": 2}, status="failed", error="out of memory", epochs=[])
    run(tmp_path / "2", config={"repeat": 3}, status="interrupted", error="SIGTERM", times=(9.0, 1.0))
    (row,) = rows(the_only(tmp_path))
    assert row["status"] == "failed 1 of 3: out of memory; interrupted 1 of 3: SIGTERM"
    assert (row["epoch, s"], "range" in row) == ("3.00", False)


def test_a_run_without_a_result_is_in_the_row_of_its_configuration(tmp_path: Path) -> None:
    """Hydra's record has interpolations where the run's own has their values."""
    run(tmp_path / "0", "cache", config={"data.loader.folder": "/data/cache"})
    folder = run(tmp_path / "1", "cache", config={"data.loader.folder": "${data.root}/cache"})
    (folder / "result.json").unlink()
    assert len(the_only(tmp_path).rows) == 1


def test_automatic_choices_that_differ_are_told_apart(tmp_path: Path) -> None:
    run(tmp_path / "0", "auto", choices={"loader": "ram"}, times=(9.0, 2.0))
    run(tmp_path / "1", "auto", choices={"loader": "disk"}, times=(9.0, 8.0))
    run(tmp_path / "2", "auto", choices={"loader": "auto"}, status="failed", error="no", epochs=[])
    assert [row["data/loader"] for row in rows(the_only(tmp_path))] == ["auto: ram", "auto: disk", "auto"]


def test_prefetch_is_named_with_its_base(tmp_path: Path) -> None:
    for number, base in enumerate(("ram", "disk")):
        loader = {"name": "prefetch", "queue_size": 2, "base": {"name": base}}
        run(tmp_path / str(number), config={"data.loader": loader}, times=(9.0, 2.0 + number))
    assert [row["data/loader"] for row in rows(the_only(tmp_path))] == ["prefetch of ram", "prefetch of disk"]


def test_a_job_without_data_is_listed_with_those_of_its_data_set(tmp_path: Path) -> None:
    for number, name in enumerate(("mnist", "kmnist")):
        run(tmp_path / str(number), dataset=DATASET | {"name": name}, config={"data.dataset": {"name": name}})
    refused = run(tmp_path / "2", status="failed", error="no", epochs=[], config={"data.dataset": {"name": "mnist"}})
    content = json.loads((refused / "result.json").read_text()) | {"environment": None, "dataset": None}
    (refused / "result.json").write_text(json.dumps(content))
    found = [[run.status for row in one.rows for run in row.runs] for one in compared(tmp_path)]
    assert found == [["completed", "failed"], ["completed"]]


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {"cpu": "Another CPU"}},
        {"environment": {"cpu_count": 8}},
        {"environment": {"host": "there"}},
        {"dataset": DATASET | {"sha256": {"train_images": "1" * 64}}},
        {"dataset": DATASET | {"name": "kmnist"}},
    ],
)
def test_machines_and_data_are_never_compared_silently(other: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "0", "ram", times=(9.0, 1.0))
    run(tmp_path / "1", "disk", times=(9.0, 5.0), **other)
    comparisons = compared(tmp_path)
    told = [summary(comparison)[0] for comparison in comparisons]
    assert told == ["**1.00 s per epoch** (single run).", "**5.00 s per epoch** (single run)."]
    for text in (as_markdown(comparisons), as_text(comparisons)):
        assert "2 machines or data sets" in text
    assert len({row["comparison"] for row in csv.DictReader(io.StringIO(as_csv(comparisons)))}) == 2


def test_other_versions_and_gpus_are_columns(tmp_path: Path) -> None:
    run(tmp_path / "0")
    run(tmp_path / "1", environment={"torch": "2.14.0", "git_commit": "b" * 40, "gpu": "A"})
    comparison = the_only(tmp_path)
    assert comparison.columns == ("GPU", "torch", "commit")
    assert [row.values for row in comparison.rows] == [("–", "2.15.0", "a" * 12), ("A", "2.14.0", "b" * 12)]


def test_long_numbers_are_cut_for_people_and_whole_in_the_table_for_machines(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"lr": 0.0014462662489})
    run(tmp_path / "1", config={"lr": 0.003})
    assert [row["lr"] for row in rows(the_only(tmp_path))] == ["0.001446", "0.003"]
    assert "0.0014462662489" in as_csv(compared(tmp_path))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.000"),
        (0.0001, "<0.001"),
        (0.0123, "0.012"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234, "1234"),
    ],
)
def test_seconds_have_three_digits(value: float | None, text: str) -> None:
    assert seconds(value) == text
