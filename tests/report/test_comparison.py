"""Only runs that may be compared are; repeats are one row, and a run that is not timed says why."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import REPOSITORY
from tests.support.records import DATASET, compared, epoch, table_of, the_only, write_run
from vitmnist.report.plots import draw_panels
from vitmnist.report.summary import CHOSEN_ON_TEST, NO_TIME, summarize_comparison
from vitmnist.report.write import build_table, write_report
from vitmnist.timing.table import format_seconds


def job(folder: Path, began: float, ended: float, host: str | None = "here", **result: Any) -> None:
    """A job whose epochs, after the first, span its time."""
    ends = [epoch(0.0001, ended_at=began), epoch(ended - began, ended_at=ended)]
    values = {"config": {"seed": int(folder.name)}, "epochs": ends, **result}
    write_run(folder, environment={"host": host}, began_at=began, ended_at=ended, **values)


def csv_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of the report on a folder."""
    write_report([folder], folder)
    return [*csv.DictReader((folder / "report.csv").read_text().splitlines())]


def test_jobs_that_overlapped_on_one_machine_are_marked_and_not_timed(tmp_path: Path) -> None:
    """One of them failed before the end of its first epoch. Jobs of other machines slow none down."""
    job(tmp_path / "0", 1000.0, 1020.0)
    job(tmp_path / "1", 1019.0, 1030.0, epochs=[], status="failed", error="reason")
    job(tmp_path / "2", 1050.0, 1070.0)
    job(tmp_path / "3", 1000.0, 1020.0, "there")
    job(tmp_path / "4", 1000.0, 1020.0, None)
    here, there, unknown = compared(tmp_path)
    (row,) = build_table(here, tmp_path)
    assert row["status"] == "1 completed, overlapping; 1 failed: reason; 1 completed"
    assert [len(row.rounds) for row in (*here.rows, *there.rows, *unknown.rows)] == [1, 1, 1]


def test_parallel_jobs_are_ranked_by_accuracy_but_not_by_time(tmp_path: Path) -> None:
    for index, accuracy in enumerate((80.0, 90.0)):
        epochs = [epoch(1.0, eval_acc=accuracy)] * 2
        write_run(tmp_path / str(index), config={"model.depth": index}, epochs=epochs, began_at=1000.0, ended_at=1020.0)
    comparison = the_only(tmp_path)
    best, _, choice, *times = summarize_comparison(comparison)
    assert best.startswith("Highest test accuracy: depth=1, 90.00%.")
    assert (choice, times) == (CHOSEN_ON_TEST, [NO_TIME])
    assert [*draw_panels(comparison)] == ["Test accuracy, %", "Seconds per epoch"], "two epochs make no curve"


def test_of_runs_with_equal_seeds_the_first_counts(tmp_path: Path) -> None:
    for index, (seed, accuracy) in enumerate(((1, 80.0), (1, 85.0), (2, 90.0), (3, 90.0), (2, 90.0))):
        write_run(tmp_path / str(index), config={"seed": seed}, epochs=[epoch(1.0, eval_acc=accuracy)] * 2)
    (row,) = the_only(tmp_path).rows
    assert row.quality_by_seed("eval_acc") == {"seed=1": 80.0, "seed=2": 90.0, "seed=3": 90.0}
    assert "Best run: 2\n" in write_report([tmp_path], tmp_path), "the first of equal ones"


def test_a_killed_run_overlaps_with_the_runs_that_it_slowed_down(tmp_path: Path) -> None:
    """It has left no record, so its files say when it was active, and the sweep on which machine."""
    for index, began in enumerate((1000.0, 2000.0)):
        job(tmp_path / str(index), began, began + 20)
    killed = write_run(tmp_path / "2")
    (killed / "result.json").unlink()
    (killed / ".lock").touch()
    os.utime(killed / ".hydra" / "config.yaml", (2010.0, 2010.0))
    for path in (killed / ".lock", killed / ".hydra", killed):
        os.utime(path, (2100.0, 2100.0))
    (row,) = the_only(tmp_path).rows
    expected = ["completed", "completed, overlapping", "killed: it left no result.json"]
    assert [run.status_text for run in row.runs] == expected


def test_each_key_that_varies_is_a_column(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ram", config={"data.root": "/a", "seed": 1})
    write_run(tmp_path / "1", "disk", config={"data.root": "/b", "data.loader.num_workers": 2, "repeat": 2})
    assert the_only(tmp_path).columns == ["data/loader"], "num_workers is an option of disk alone"
    write_run(tmp_path / "2", "disk", config={"model.depth": 3, "seed": 7})
    assert set(the_only(tmp_path).columns) == {"data/loader", "model.depth", "data.loader.num_workers"}
    varied = {"distributed": {"ranks": 2}, "environment": {"torch": "2.14.0", "new fact": 1}, "device": "cuda:0"}
    write_run(tmp_path / "3", config={"device": "cuda"}, **varied)
    assert the_only(tmp_path).columns[-3:] == ["torch", "resolved device", "processes"]
    rows = table_of(tmp_path)
    assert {(row["processes"], row["torch"]) for row in rows} == {("–", "2.15.0"), ("2", "2.14.0")}


def test_options_of_a_trainer_have_columns_and_loaders_are_named_with_base_and_automatic_choice(tmp_path: Path) -> None:
    folder = REPOSITORY / "conf" / "trainer"
    plain, fast = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("plain", "fast"))
    for index, trainer in enumerate([plain, fast, {**plain, "fused": True, "micro_batch": 250}]):
        write_run(tmp_path / "trainers" / str(index), config={"trainer": trainer})
    columns = ("trainer", "micro_batch", "fused")
    labels = [tuple(row[column] for column in columns) for row in table_of(tmp_path / "trainers")]
    assert labels == [("plain", "None", "False"), ("fast", "auto", "auto"), ("plain", "250", "True")]
    for index, base in enumerate(("ram", "disk")):
        loader = {"name": "prefetch", "queue_size": 2, "base": {"name": base}}
        write_run(tmp_path / "loaders" / str(index), config={"data.loader": loader})
    for index, auto in enumerate(({"name": "ram"}, None), 2):
        write_run(tmp_path / "loaders" / str(index), "auto", auto=auto)
    labels = [row["loader"] for row in table_of(tmp_path / "loaders")]
    assert labels == ["prefetch of ram", "prefetch of disk", "auto: ram", "auto"]


def test_a_run_contributes_the_median_of_its_steady_epochs(tmp_path: Path) -> None:
    """They are the epochs of the last start but its first: earlier starts may have had another loader or machine."""
    resumed = [epoch(time, first_of_start=time > 8) for time in (9.0, 30.0, 40.0, 9.0, 2.0, 4.0)]
    write_run(tmp_path / "0-a", epochs=resumed, setup_s=1.5)
    write_run(tmp_path / "1-b", "disk", epochs=[epoch(11.0), epoch(13.0, first_of_start=True)])
    ram, disk = table_of(tmp_path)
    assert (
        ram.items() >= {"epoch, s": "3.00", "training, s": "2.40", "waiting, s": "0.600", "waiting, %": "25.0"}.items()
    )
    shown = {"images/s": "28", "test accuracy, %": "90.00", "host, MiB": "700", "set-up, s": "1.50"}
    assert ram.items() >= shown.items()
    assert (disk["epoch, s"], disk["status"]) == ("13.0", "completed, first epoch only")
    assert not {"GPU, MiB", "× fastest", "range of epoch, s", "saving, s"} & ram.keys(), "empty in all rows"


def test_quality_stands_before_time_with_its_seeds_and_the_test_split_and_orders_the_rows(tmp_path: Path) -> None:
    """Each run counts with its best epoch by the monitored metric."""
    for index, (depth, seed, best) in enumerate([(3, 1, 70.0), (6, 1, 80.0), (6, 2, 90.0), (9, 1, 60.0)]):
        epochs = [epoch(10.0 - depth, eval_macro_f1=value, eval_acc=value + 1) for value in (50.0, best, 55.0)]
        config, test = {"seed": seed, "model.depth": depth, "monitor": "macro_f1"}, {"test_acc": best - 2}
        write_run(tmp_path / str(index), config=config, epochs=epochs, eval_split="validation", test=test)
    cells = table_of(tmp_path)
    quality = ("validation macro F1, %", "test accuracy, %", "validation accuracy, %")
    assert [*cells[0]][:6] == ["depth", *quality[:2], "epoch, s", "its best run", quality[2]]
    assert [tuple(row[title] for title in ("depth", *quality)) for row in cells] == [
        ("6", "85.00 ± 7.07", "83.00 ± 7.07", "86.00 ± 7.07"),
        ("3", "70.00", "68.00", "71.00"),
        ("9", "60.00", "58.00", "61.00"),
    ]
    assert [row["its best run"] for row in cells] == ["2", "0", "3"]
    assert [(row["test_acc"], row["best_run"]) for row in csv_rows(tmp_path)] == [
        *(("68.0", "0"), ("83.0", "2"), ("58.0", "3"))
    ]


def test_without_the_package_of_the_monitored_metric_no_epoch_is_taken_for_the_best(tmp_path: Path) -> None:
    epochs = [epoch(2.0, eval_mine=value, eval_acc=100 - value) for value in (10.0, 30.0, 20.0)]
    write_run(tmp_path / "0", config={"monitor": "eval_mine"}, epochs=epochs, eval_split="validation")
    (row,) = table_of(tmp_path)
    assert not any(title.startswith("validation accuracy") for title in row)
    assert row["status"] == "completed, monitor=eval_mine is not registered"


def unfinished(folder: Path, left: str) -> None:
    """A run of disk that left a file, but no result."""
    (write_run(folder, "disk") / "result.json").unlink()
    (folder / left).touch()


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda f: write_run(f, "disk", status="failed", error="no memory | <b>", epochs=[]), "failed: no memory"),
        (lambda f: write_run(f, "disk", status="interrupted", error="SIGTERM"), "interrupted: SIGTERM"),
        (lambda f: unfinished(f, ".lock"), "killed: it left no result.json"),
        (lambda f: unfinished(f, "vitmnist.log"), "not started"),
        (lambda f: (write_run(f, "disk") / "result.json").write_text("{"), "unreadable: 1/result.json: is not JSON: "),
        (lambda f: write_run(f, "disk", format=2), "unreadable: 1/result.json: has format 2, and this version"),
        (
            lambda f: (write_run(f, "disk") / "result.json").write_text("{}"),
            "unreadable: 1/result.json: does not contain",
        ),
        (lambda f: write_run(f, "disk", resumed=True), "completed, resumed"),
    ],
)
def test_a_run_that_did_not_simply_complete_has_a_row_that_says_why(make: Any, status: str, tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    make(tmp_path / "1")
    text = write_report([tmp_path], tmp_path)
    cells = [row for comparison in compared(tmp_path) for row in build_table(comparison, tmp_path)]
    assert [row["loader"] for row in cells] == ["ram", "disk"]
    assert cells[0]["status"] == "completed"
    assert cells[1]["status"].startswith(status)
    assert status in text
    assert "<b>" not in (tmp_path / "report.md").read_text()


def test_runs_without_records_are_listed_with_their_configuration_and_their_sweep(tmp_path: Path) -> None:
    for index in (0, 1):
        write_run(tmp_path / "lost" / f"{index}", "cache", config={"data.loader.folder": "/data/cache"})
    (tmp_path / "lost" / "1" / "result.json").unlink()
    assert len(the_only(tmp_path / "lost").rows) == 1
    write_run(tmp_path / "sweep" / "0")
    refused = write_run(tmp_path / "sweep" / "1", status="failed", error="no", epochs=[], dataset=None)
    (refused / "result.json").write_text((refused / "result.json").read_text().replace('"environment": {', '"x": {'))
    cells = the_only(tmp_path / "sweep").rows
    assert [run.result.status for row in cells for run in row.runs] == ["completed", "failed"]


OTHER_DATA = {"dataset": DATASET | {"sha256": {"train_images": "1" * 64}}}


@pytest.mark.parametrize("other", [OTHER_DATA, {"environment": {"host": "there"}}])
def test_machines_and_datasets_are_not_compared_with_each_other(other: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ram", times=(9.0, 1.0))
    write_run(tmp_path / "1", "disk", times=(9.0, 5.0), **other)
    for text in (write_report([tmp_path], tmp_path), (tmp_path / "report.md").read_text()):
        assert text.count(", Some CPU, ") == 2
        assert all(f"Time: {time} s per epoch (one round)." in text for time in ("1.00", "5.00"))
    assert {row["comparison"] for row in csv_rows(tmp_path)} == {"1", "2"}
    page = (tmp_path / "report.html").read_text()
    assert page.index('alt="Seconds per epoch"') < page.index("<table>") < page.rindex('alt="Seconds per epoch"')


def test_hold_outs_drawn_from_one_dataset_are_folds_of_a_row(tmp_path: Path) -> None:
    """Other hold-outs of the same files, not other files or shares."""
    for index, (depth, fold, share, whole) in enumerate(
        [(3, 0, 0.2, "1"), (3, 1, 0.2, "1"), (6, 0, 0.2, "1"), (6, 1, 0.2, "1"), (6, 1, 0.3, "1"), (6, 1, 0.2, "2")]
    ):
        checksums = {"sha256": {"train_images": str(index) * 64}, "division": {"holdout": share, "all": whole * 64}}
        config = {"model.depth": depth, "data.holdout": share, "data.holdout_seed": fold}
        epochs = [epoch(2.0, eval_acc=80.0 + depth + index, train_loss=index)]
        write_run(tmp_path / str(index), config=config, epochs=epochs, dataset=DATASET | checksums)
    folds, *others = compared(tmp_path)
    assert [len(comparison.rows) for comparison in others] == [1, 1]
    assert summarize_comparison(folds)[:2] == [
        "Highest mean test accuracy: depth=6, 88.50% ± 0.71 (mean ± sd over 2 seeds).",
        "2 seeds do not show the noise; set seed=1,2,3 or more.",
    ]
    cells = [row["test accuracy, %"] for row in build_table(folds, tmp_path)]
    assert cells == ["88.50 ± 0.71", "83.50 ± 0.71"]


def test_an_option_in_a_list_of_members_has_a_column_and_keys_with_equal_last_parts_are_named_in_full(
    tmp_path: Path,
) -> None:
    for index, (pixels, width) in enumerate(((1, 8), (2, 16))):
        augment = {"name": "mine", "operations": [{"name": "shift", "pixels": pixels}]}
        write_run(tmp_path / str(index), config={"data.augment": augment, "model.width": width, "data.width": width})
    assert all(row.keys() >= {"model.width", "data.width", "pixels"} for row in table_of(tmp_path))


def test_patterns_of_learning_rates_in_another_order_are_another_configuration(tmp_path: Path) -> None:
    factors = {"*": 0.1, "head.*": 1}
    for number, patterns in enumerate((factors, dict(reversed(factors.items())))):
        write_run(tmp_path / str(number), config={"lr_scale": patterns})
    assert [row["lr_scale"] for row in table_of(tmp_path)] == [str(factors), str(dict(reversed(factors.items())))]


def test_numbers_are_rounded_in_the_report_but_not_in_the_csv(tmp_path: Path) -> None:
    rates = (0.0014462662489, 0.0014462672489)
    for index, rate in enumerate(rates):
        write_run(tmp_path / str(index), config={"lr": rate}, epochs=[epoch(2.0, eval_acc=95.0 - index)] * 2)
    assert summarize_comparison(the_only(tmp_path))[0] == "Highest test accuracy: lr=0.00145, 95.00%."
    assert [row["lr"] for row in table_of(tmp_path)] == ["0.00145", "0.00145"]
    assert [row["lr"] for row in csv_rows(tmp_path)] == [*map(str, rates)]
    times = {0.0: "0.00", 0.0123: "0.0123", 1.234: "1.23", 12.34: "12.3", 99.97: "100", 1234.5: "1,234"}
    assert [format_seconds(time) for time in times] == list(times.values())
