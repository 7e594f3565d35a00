"""`epochs.csv` has one row for each epoch of the record, at any moment and after any end of the run."""

import csv
from pathlib import Path

from tests.conftest import Printed, Start, Train, result_of
from vitmnist.errors import ExitCode


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "epochs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_killed_run_keeps_its_rows_and_repeats_none(
    quick: list[str], start: Start, train_here: Train, succeed: Printed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    succeed(*quick, "epochs=1", "hydra.run.dir=run")
    started = start("resume=run", "epochs=100000", "checkpoint.min_interval_s=null").until("epoch 2/100000")
    started.until("epoch 5/100000").kill_group()
    assert [row["epoch"] for row in rows(run)][:4] == ["0", "1", "2", "3"]
    assert train_here("resume=run", "epochs=2", "max_minutes=0").returncode == ExitCode.UNFINISHED
    assert [row["epoch"] for row in rows(run)] == ["0"]
    for epochs in (2, 3):
        succeed("resume=run", f"epochs={epochs}", "max_minutes=null")
        assert [row["epoch"] for row in rows(run)] == [*map(str, range(epochs))]
        values = [{**epoch, "steps": None} for epoch in result_of(run)["epochs"]]
        as_text = [{name: "" if value is None else str(value) for name, value in epoch.items()} for epoch in values]
        assert [row | {"steps": ""} for row in rows(run)] == as_text
