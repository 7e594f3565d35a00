"""A report: complete, of what may be compared, and the same in each of its files."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from PIL import Image

from vitmnist.errors import DataError
from vitmnist.report.answer import answer
from vitmnist.report.compare import Comparison, Spread, compare
from vitmnist.report.runs import find_runs, read_run
from vitmnist.report.table import articles_table, seconds, table
from vitmnist.report.write import as_markdown, as_text, write_report

ENVIRONMENT = {
    "cpu": "Some CPU",
    "cpu_count": 4,
    "gpu": None,
    "gpu_driver": None,
    "torch_threads": 4,
    "platform": "Linux",
    "python": "3.12.1",
    "torch": "2.15.0",
    "git_commit": "a" * 40,
    "git_dirty": False,
}
TRAINERS = ("plain", "fast")
DATASET = {"name": "mnist", "train_size": 60, "test_size": 10, "sha256": {"train_images": "0" * 64}}


def epoch(seconds: float, loss: float = 0.5, **figures: Any) -> dict[str, Any]:
    return {
        "epoch_s": seconds,
        "train_s": 0.8 * seconds,
        "eval_s": 0.2 * seconds,
        "data_wait_s": 0.2 * seconds,
        "compute_s": 0.5 * seconds,
        "images_per_s": 60 / (0.8 * seconds),
        "train_loss": loss,
        "val_loss": loss,
        "val_acc": 90.0,
        "host_peak_mib": 700.0,
        "gpu_peak_mib": None,
        "gpu_util_pct": None,
        **figures,
    }


def run(
    folder: Path,
    loader: str = "ram",
    batch_size: int = 100,
    times: tuple[float, ...] = (9.0, 2.0, 4.0),
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    epochs: list[dict[str, Any]] | None = None,
    **result: Any,
) -> Path:
    """The folder of a run, as a run leaves it."""
    whole = {
        "batch_size": batch_size,
        "seed": 42,
        "repeat": 1,
        "model": {"name": "vit", "depth": 6},
        "data": {"root": "/data", "loader": {"name": loader, **({"num_workers": 0} if loader == "disk" else {})}},
    }
    for key, value in (config or {}).items():
        node = whole
        *groups, last = key.split(".")
        for group in groups:
            node = node[group]
        node[last] = value
    content = {
        "status": "completed",
        "error": None,
        "config": whole,
        "choices": {"loader": loader},
        "epochs": [epoch(time) for time in times] if epochs is None else epochs,
        "dataset": DATASET,
        "environment": ENVIRONMENT | (environment or {}),
        **result,
    }
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(whole))
    (folder / "result.json").write_text(json.dumps(content))
    return folder


def unfinished(folder: Path, left: str) -> None:
    """A run of disk that has left a file, and no result."""
    (run(folder, "disk") / "result.json").unlink()
    (folder / left).touch()


def compared(*folders: Path) -> list[Comparison]:
    return compare([read_run(found) for found in find_runs(folders)])


def the_only(folder: Path) -> Comparison:
    (comparison,) = compared(folder)
    return comparison


def rows(comparison: Comparison) -> list[dict[str, str]]:
    header, lines = table(comparison)
    return [dict(zip(header, line, strict=True)) for line in lines]


def job(folder: Path, began: float, ended: float, host: str | None = "here", **result: Any) -> None:
    what = {"config": {"seed": int(folder.name)}, "epochs": [epoch(ended - began, ended_at=ended)], **result}
    run(folder, environment={"host": host}, began_at=began, ended_at=ended, **what)


def test_jobs_that_ran_at_the_same_time_on_one_machine_are_marked(tmp_path: Path) -> None:
    """Also one that failed before its first epoch was over; a job of another machine disturbs none."""
    times = [epoch(10.0, ended_at=1010.0), epoch(10.0, ended_at=1020.0)]
    job(tmp_path / "0", 1000.0, 1020.0, epochs=times)
    job(tmp_path / "1", 1019.0, 1030.0, epochs=[], status="failed", error="of something")
    job(tmp_path / "2", 1050.0, 1070.0)
    job(tmp_path / "3", 1000.0, 1020.0, "there")
    job(tmp_path / "4", 1000.0, 1020.0, None)
    comparison = the_only(tmp_path)
    assert [row["status"] for row in rows(comparison)] == [
        "completed, disturbed",
        "failed: of something; disturbed",
        *["completed"] * 3,
    ]
    said = " ".join(answer(comparison))
    assert "2 runs were at work while another was on the same machine" in said
    assert "**Fastest: seed=2" in said
    assert "seed=0" not in said  # no time of it is compared
    assert {row["× slowest"] for row in rows(comparison)} == {"–"}


def test_a_resumed_job_was_not_at_work_while_it_was_stopped(tmp_path: Path) -> None:
    """Its sittings are known by the epochs of the first and by the times of the last."""
    times = [epoch(10.0, ended_at=1010.0), epoch(10.0, ended_at=2010.0)]
    job(tmp_path / "0", 2000.0, 2011.0, epochs=times)
    job(tmp_path / "1", 1500.0, 1510.0)
    assert not the_only(tmp_path).disturbed
    job(tmp_path / "2", 1005.0, 1006.0)
    assert the_only(tmp_path).disturbed == 2


def test_processes_and_shards_stand_in_the_report(tmp_path: Path) -> None:
    run(tmp_path / "0")
    run(tmp_path / "1", distributed={"ranks": 2, "placement": None})
    run(tmp_path / "2", distributed={"ranks": 2, "placement": "shard"})
    comparison = the_only(tmp_path)
    assert comparison.columns == ("processes", "placement of the set")
    assert [(row["processes"], row["placement of the set"]) for row in rows(comparison)] == [
        ("–", "–"),
        ("2", "–"),
        ("2", "shard"),
    ]
    assert "the set is shuffled within the part of each process" in " ".join(answer(comparison))


def test_what_was_swept_makes_the_columns_whatever_it_was(tmp_path: Path) -> None:
    run(tmp_path / "0", "ram", config={"data.root": "/a"})
    run(tmp_path / "1", "disk", config={"data.root": "/b", "data.loader.num_workers": 2})
    assert the_only(tmp_path).columns == ("data/loader",)  # num_workers is disk's own, the root tells nothing
    run(tmp_path / "2", "disk", config={"model.depth": 3, "seed": 7})
    assert set(the_only(tmp_path).columns) == {"data/loader", "model.depth", "seed", "data.loader.num_workers"}
    assert rows(the_only(tmp_path))[2]["model.depth"] == "3"


def test_trainers_are_told_apart_by_what_one_types(tmp_path: Path) -> None:
    plain, fast = (yaml.safe_load((REPOSITORY / "conf" / "trainer" / f"{name}.yaml").read_text()) for name in TRAINERS)
    run(tmp_path / "0", config={"trainer": plain})
    run(tmp_path / "1", config={"trainer": fast})
    run(tmp_path / "2", config={"trainer": {**plain, "fused": True, "micro_batch": 250}})
    run(tmp_path / "3", config={"trainer": {**fast, "precision": "fp32"}})
    assert the_only(tmp_path).columns == ("trainer",)
    told = [row["trainer"] for row in rows(the_only(tmp_path))]
    assert told == ["plain", "fast", "plain, micro_batch=250, fused=true", "fast, precision=fp32"]


def test_the_figures_are_medians_of_the_epochs_that_count(tmp_path: Path) -> None:
    run(tmp_path / "0-a", times=(9.0, 2.0, 4.0, 3.0))
    run(tmp_path / "1-b", "disk", times=(12.0,))
    ram, disk = rows(the_only(tmp_path))
    assert (ram["epoch, s"], ram["range"]) == ("3.00", "2.00–4.00")
    assert (disk["epoch, s"], disk["range"]) == ("12.0", "–")
    assert (ram["waiting, s"], ram["waiting, %"]) == ("0.600", "25.0")
    assert ram["images/s"] == "25"
    assert (ram["× slowest"], disk["× slowest"]) == ("4.00", "1.00")
    assert (ram["accuracy, %"], ram["host, MiB"], ram["GPU, MiB"], ram["GPU busy, %"]) == ("90.00", "700", "–", "–")
    assert "status" not in ram


def test_repeats_are_one_row_with_the_spread_of_all(tmp_path: Path) -> None:
    for number, time in enumerate((2.0, 6.0, 3.0)):
        run(tmp_path / str(number), times=(9.0, time), config={"repeat": number + 1})
    run(tmp_path / "3", "disk", times=(9.0, 8.0))
    ram, disk = rows(the_only(tmp_path))
    assert (ram["runs"], ram["epoch, s"], ram["range"]) == ("3", "3.00", "2.00–6.00")
    assert disk["runs"] == "1"


def test_the_articles_layout_has_batch_sizes_down_and_loaders_across(tmp_path: Path) -> None:
    for number, (loader, size, time) in enumerate(
        [("disk", 1000, 8.0), ("disk", 300, 9.0), ("ram", 1000, 4.0), ("ram", 300, 5.0)]
    ):
        run(tmp_path / str(number), loader, size, (10.0, time))
    assert articles_table(the_only(tmp_path)) == (
        ["batch size", "disk", "ram"],
        [["300", "9.00", "**5.00**"], ["1,000", "8.00", "**4.00**"]],
    )
    run(tmp_path / "4", "ram", 300, config={"model.depth": 3})
    assert not the_only(tmp_path).loader_by_batch_size()


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda f: run(f, "disk", status="failed", error="out of memory | <b>", epochs=[]), "failed: out of memory"),
        (lambda f: run(f, "disk", status="interrupted", error="SIGTERM"), "interrupted: SIGTERM"),
        (lambda f: unfinished(f, ".lock"), "killed: it left no result.json"),
        (lambda f: unfinished(f, "vitmnist.log"), "not begun"),
        (lambda f: (run(f, "disk") / "result.json").write_text("{"), "unreadable: result.json: "),
        (lambda f: (run(f, "disk") / "result.json").write_text('{"epochs": [3]}'), "unreadable: result.json: "),
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


@pytest.mark.parametrize(
    "odd",
    [
        {"config": [3]},
        {"choices": "ram"},
        {"dataset": {"name": "mnist"}},
        {"epochs": None},
        {"epochs": [epoch(2.0, train_s=0.0)]},
        {"epochs": [epoch(2.0, val_acc="high")]},
        {"epochs": [epoch(float("nan"))]},
    ],
)
def test_records_that_are_not_as_they_should_be_make_one_row_unreadable(odd: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "0")
    content = json.loads((run(tmp_path / "1", "disk") / "result.json").read_text()) | odd
    (tmp_path / "1" / "result.json").write_text(json.dumps(content))
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    (tmp_path / "2" / ".hydra" / "config.yaml").write_bytes(b"\xff\xfe")
    write_report([tmp_path], tmp_path)
    with (tmp_path / "report.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert statuses[0] == "completed"
    assert statuses[1].startswith("unreadable: result.json: ")
    assert statuses[2] == "not begun"


def test_each_reason_is_counted(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"repeat": 1})
    run(tmp_path / "1", config={"repeat": 2}, status="failed", error="out of memory", epochs=[])
    run(tmp_path / "2", config={"repeat": 3}, status="interrupted", error="SIGTERM", times=(9.0,))
    (row,) = rows(the_only(tmp_path))
    assert row["status"] == "failed 1 of 3: out of memory; interrupted 1 of 3: SIGTERM"
    assert (row["epoch, s"], row["range"]) == ("3.00", "2.00–4.00")  # without what warmed up


def test_a_run_without_a_result_stands_in_the_row_of_its_configuration(tmp_path: Path) -> None:
    """Hydra's record has interpolations where the run's own has their values."""
    run(tmp_path / "0", "cache", config={"data.loader.folder": "/data/cache"})
    folder = run(tmp_path / "1", "cache", config={"data.loader.folder": "${data.root}/cache"})
    (folder / "result.json").unlink()
    assert len(the_only(tmp_path).cells) == 1


def test_automatic_choices_that_differ_are_told_apart(tmp_path: Path) -> None:
    run(tmp_path / "0", "auto", choices={"loader": "ram"}, times=(9.0, 2.0))
    run(tmp_path / "1", "auto", choices={"loader": "disk"}, times=(9.0, 8.0))
    run(tmp_path / "2", "auto", choices={"loader": "auto"}, status="failed", error="no", epochs=[])
    assert [row["data/loader"] for row in rows(the_only(tmp_path))] == ["auto: ram", "auto: disk", "auto"]


def test_prefetch_is_named_with_its_base(tmp_path: Path) -> None:
    for number, base in enumerate(("ram", "disk")):
        loader = {"name": "prefetch", "queue_size": 2, "base": {"name": base}}
        run(tmp_path / str(number), config={"data.loader": loader}, times=(9.0, 2.0 + number))
    run(tmp_path / "2", "ram", times=(9.0, 4.0))
    assert [row["data/loader"] for row in rows(the_only(tmp_path))] == ["prefetch of ram", "prefetch of disk", "ram"]
    assert "a factor of 2.00 (prefetch of ram over ram)" in " ".join(answer(the_only(tmp_path)))


def test_a_loader_is_not_compared_with_itself(tmp_path: Path) -> None:
    run(tmp_path / "0", "disk", config={"data.loader.num_workers": 0}, times=(9.0, 2.0))
    run(tmp_path / "1", "disk", config={"data.loader.num_workers": 2}, times=(9.0, 4.0))
    said = " ".join(answer(the_only(tmp_path)))
    assert "Every loader" not in said
    assert "The choice of the loader" not in said


def test_a_job_without_data_stands_with_those_of_its_data_set(tmp_path: Path) -> None:
    for number, name in enumerate(("mnist", "kmnist")):
        run(tmp_path / str(number), dataset=DATASET | {"name": name}, config={"data.dataset": {"name": name}})
    refused = run(tmp_path / "2", status="failed", error="no", epochs=[], config={"data.dataset": {"name": "mnist"}})
    content = json.loads((refused / "result.json").read_text()) | {"environment": None, "dataset": None}
    (refused / "result.json").write_text(json.dumps(content))
    assert [[run.status for cell in one.cells for run in cell.runs] for one in compared(tmp_path)] == [
        ["completed", "failed"],
        ["completed"],
    ]


def test_names_with_underscores_stay_as_they_are(tmp_path: Path) -> None:
    run(tmp_path / "0", "gpu_slice", status="failed", error="a/__init__.py: _em_ **b** $a_$ 5*3*2")
    run(tmp_path / "1", "ram")
    write_report([tmp_path], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "failed: a/__init__.py: _em_ **b** $a_$ 5*3*2" in page
    assert "gpu_slice" in (tmp_path / "report.md").read_text()


def test_dollars_are_no_formulas(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"path": "$a_$b{$"})
    run(tmp_path / "1", config={"path": "x"})
    write_report([tmp_path], tmp_path)


def test_a_run_that_never_began_stands_with_the_others_of_its_sweep(tmp_path: Path) -> None:
    run(tmp_path / "sweep" / "0")
    run(tmp_path / "sweep" / "1", "disk", status="failed", error="no", epochs=[], environment=None, dataset=None)
    content = json.loads((tmp_path / "sweep" / "1" / "result.json").read_text()) | {"environment": None}
    (tmp_path / "sweep" / "1" / "result.json").write_text(json.dumps(content))
    assert len(the_only(tmp_path).cells) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {"cpu": "Another CPU"}},
        {"environment": {"cpu_count": 8}},
        {"dataset": DATASET | {"sha256": {"train_images": "1" * 64}}},
        {"dataset": DATASET | {"name": "kmnist"}},
    ],
)
def test_machines_and_data_are_never_compared_silently(other: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "0", "ram", times=(9.0, 1.0))
    run(tmp_path / "1", "disk", times=(9.0, 5.0), **other)
    comparisons = compared(tmp_path)
    assert [row["× slowest"] for comparison in comparisons for row in rows(comparison)] == ["1.00", "1.00"]
    for text in (as_markdown(comparisons), as_text(comparisons)):
        assert "2 machines or data sets" in text
    assert len({line.split(",")[0] for line in write_csv(tmp_path)[1:]}) == 2


def write_csv(folder: Path) -> list[str]:
    write_report([folder], folder / "report")
    return (folder / "report" / "report.csv").read_text().splitlines()


def test_a_run_on_the_cpu_is_of_the_machine_whose_gpu_another_used(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"device": "cpu"})
    run(tmp_path / "1", config={"device": "cuda"}, environment={"gpu": "A", "gpu_driver": "1"})
    assert the_only(tmp_path).columns[0] == "device"
    run(tmp_path / "2", config={"device": "cuda"}, environment={"gpu": "B", "gpu_driver": "1"})
    assert len(compared(tmp_path)) == 3  # whose GPU the first had beside it is not known any more


def test_other_versions_stand_in_a_column(tmp_path: Path) -> None:
    run(tmp_path / "0")
    run(tmp_path / "1", environment={"torch": "2.14.0", "git_commit": "b" * 40})
    comparison = the_only(tmp_path)
    assert comparison.columns == ("torch", "commit")
    assert [cell.values for cell in comparison.cells] == [("2.15.0", "a" * 12), ("2.14.0", "b" * 12)]


def test_the_answer_names_the_fastest_and_who_cannot_be_told_from_it(tmp_path: Path) -> None:
    run(tmp_path / "0", "disk", times=(9.0, 8.0, 8.0))
    run(tmp_path / "1", "ram", times=(9.0, 2.0, 3.0))
    run(tmp_path / "2", "gpu_slice", times=(9.0, 2.5, 3.5))
    fastest, worth, same = answer(the_only(tmp_path))
    assert fastest.startswith(
        "**Fastest: data/loader=ram, 2.50 s an epoch** (2.00–3.00), 3.20 times as fast as data/loader=disk"
    )
    assert "(8.00 s). Not to be told apart from it: data/loader=gpu_slice. Each was run once" in fastest
    assert worth == "The choice of the loader is worth a factor of 3.20 (ram over disk)."
    assert same.startswith("Every loader ended in the same losses, to the last bit")


def test_losses_that_differ_between_loaders_are_named(tmp_path: Path) -> None:
    run(tmp_path / "0", "disk", epochs=[epoch(2.0, loss=0.5)])
    run(tmp_path / "1", "ram", epochs=[epoch(2.0, loss=0.25)])
    assert "The training losses of the loaders differ by up to 0.25." in answer(the_only(tmp_path))


def test_losses_that_differ_because_jobs_decided_for_themselves_are_explained(tmp_path: Path) -> None:
    for number, (loader, micro_batch) in enumerate((("ram", 250), ("disk", 500))):
        trainer = {"micro_batch": micro_batch, "compile": False, "reasons": {"micro_batch": f"measured {number}"}}
        epochs = [epoch(1.0, loss=0.5 + number / 1024)] * 2
        run(tmp_path / str(number), loader, epochs=epochs, trainer=trainer)
    told = "differ by up to 0.00098: each job decided anew what trainer=auto means"
    assert any(told in sentence for sentence in answer(the_only(tmp_path)))


def test_the_most_accurate_is_named_where_accuracies_differ(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"model.depth": 3})
    run(tmp_path / "1", config={"model.depth": 6}, epochs=[epoch(2.0, val_acc=95.0)])
    assert answer(the_only(tmp_path))[-1] == "Highest accuracy: model.depth=6, 95.00%."


def test_the_loader_is_not_named_where_it_makes_no_difference(tmp_path: Path) -> None:
    for number, (loader, size) in enumerate((loader, size) for loader in ("ram", "disk") for size in (100, 200)):
        run(tmp_path / str(number), loader, size, epochs=[epoch(2.0, val_acc=size / 4)])
    assert answer(the_only(tmp_path))[-1] == "Highest accuracy: batch_size=200, 50.00%."


def test_all_files_say_the_same(tmp_path: Path) -> None:
    cells = [(loader, size) for loader in ("disk", "ram") for size in (100, 200, 400)]
    for number, (loader, size) in enumerate(cells):
        run(tmp_path / "sweep" / f"{number}", loader, size, (9.0, 2.0 + number))
    write_report([tmp_path / "sweep"], tmp_path / "report")
    files = {file.name: file for file in (tmp_path / "report").iterdir()}
    assert {"report.md", "report.csv", "report.png", "report.html"} <= files.keys()
    with files["report.csv"].open() as file:
        measured = list(csv.DictReader(file))
    assert [(row["data/loader"], row["batch_size"], float(row["epoch_s"])) for row in measured] == [
        (loader, str(size), 2.0 + number)
        for number, (loader, size) in enumerate(
            (loader, size) for loader in ("disk", "ram") for size in (100, 200, 400)
        )
    ]
    text, page = files["report.md"].read_text(), files["report.html"].read_text()
    assert len(re.findall(r"^\| +(?:100|200|400) +\| (?:disk|ram) ", text, re.MULTILINE)) == 6
    for shown in ("Some CPU", "2.15.0", "mnist, 60 training and 10 test images", "a" * 12, "2.00"):
        assert shown in text
        assert shown in page
    assert page.count("<tr>") == (1 + 6) + (1 + 3)
    picture = Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", page)[1])))
    assert picture.size == Image.open(files["report.png"]).size
    assert picture.size[1] > 500


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    hostile = '<script src="http://x/y.js"></script> [a](javascript:b) | `c` **d**\nnext line'
    run(tmp_path / "0", status="failed", error=hostile)
    write_report([tmp_path], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<(?:script|link|iframe)|<[^>]*(?:src|href)=[\"'](?!data:)", page)
    assert "&lt;script src=" in page
    assert page.count("<tr>") == 2


def test_the_picture_can_be_read_without_colours(tmp_path: Path) -> None:
    """No two lines share marker and dash, no two parts of a bar lightness and hatch."""
    from vitmnist.report.picture import LINES, PARTS

    assert len({(marker, str(dash)) for marker, dash, _ in LINES}) == len(LINES)
    lightness = [sum(int(colour[place : place + 2], 16) for place in (1, 3, 5)) / 3 for _, colour, _ in PARTS]
    assert all(abs(one - other) > 40 for one, other in zip(sorted(lightness), sorted(lightness)[1:], strict=False))


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        run(tmp_path / "sweep" / f"{number}-x")
    found = find_runs([tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "9-x"])
    assert [one.name for one in found] == ["2-x", "9-x", "10-x"]


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(DataError, match="there is no such folder"):
        find_runs([tmp_path / "nowhere"])


def report(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "vitmnist.report", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_reports_across_sweeps_without_torch(tmp_path: Path) -> None:
    run(tmp_path / "one" / "0", "ram")
    run(tmp_path / "two" / "0", "disk")
    ended = report("one", "two", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Fastest: data/loader=" in ended.stdout or "data/loader" in ended.stdout
    (page,) = (tmp_path / "outputs" / "reports").rglob("report.html")
    assert ended.stdout.splitlines()[-1] == str(page.relative_to(tmp_path))
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: nowhere: there is no such folder; "),
        (["."], "error: .: holds no run; "),
        (["one", "--output", "file/x"], "error: file"),
    ],
)
def test_a_mistake_gets_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if arguments[0] == "one":
        run(tmp_path / "one")
    command = [sys.executable, "-m", "vitmnist.report", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1


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


def test_long_numbers_are_cut_for_people_and_whole_in_the_table_for_machines(tmp_path: Path) -> None:
    run(tmp_path / "0", config={"lr": 0.0014462662489})
    run(tmp_path / "1", config={"lr": 0.003})
    assert [row["lr"] for row in rows(the_only(tmp_path))] == ["0.001446", "0.003"]
    assert "0.0014462662489" in write_csv(tmp_path)[1]


def test_ranges_that_touch_cannot_be_told_apart() -> None:
    one = Spread.of([1.0, 2.0])
    assert one.overlaps(Spread.of([2.0, 3.0]))
    assert not one.overlaps(Spread.of([2.1, 3.0]))
    assert Spread.of([]) is None


@pytest.mark.parametrize(("number", "place"), [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6), (50, 18)])
def test_the_more_is_measured_the_surer_is_the_median(number: int, place: int) -> None:
    """The order statistics that bound the median with 95% confidence, by the table in Conover (1999)."""
    spread = Spread.of([float(value) for value in range(1, number + 1)])
    assert spread.sure == (place, number + 1 - place)


def test_a_search_for_the_shortest_way_to_an_accuracy_answers_that(tmp_path: Path) -> None:
    aim = {"objective": "seconds_to_target", "target_acc": 97.0}
    slow = [epoch(1.0, val_acc=90.0), epoch(1.0, val_acc=97.0)]
    run(tmp_path / "0", config={"sweep": aim, "lr": 1.0}, epochs=slow)
    run(tmp_path / "1", config={"sweep": aim, "lr": 2.0}, epochs=[epoch(1.5, val_acc=98.0)])
    run(tmp_path / "2", config={"sweep": aim, "lr": 3.0}, epochs=[epoch(0.5, val_acc=96.0)])
    assert [row["to 97%, s"] for row in rows(the_only(tmp_path))] == ["2.00", "1.50", "–"]
    assert answer(the_only(tmp_path))[0] == "**First at 97%: lr=2.0, after 1.50 s.**"
    run(tmp_path / "x" / "0", config={"sweep": {**aim, "target_acc": 99.0}}, epochs=slow)
    assert answer(the_only(tmp_path / "x"))[0] == "**No run reached 99%.**"


def test_reading_changes_nothing(tmp_path: Path) -> None:
    folder = run(tmp_path / "0")
    (folder / ".lock").touch()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    compared(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
