"""Writes records of runs with known content."""

import json
from pathlib import Path
from typing import Any

import yaml

from vitmnist.report.comparison import Comparison, compare
from vitmnist.report.write import build_table
from vitmnist.tracking.runs import find_runs, read_run

Records = list[dict[str, Any]]
"""The arguments of `write_run`, for each of several runs."""

ENVIRONMENT = {
    **{"host": "here", "cpu": "Some CPU", "cpu_count": 4, "gpu": None, "torch_threads": 4},
    **{"python": "3.12.1", "torch": "2.15.0"},
}
DATASET = {"name": "mnist", "train_size": 60, "test_size": 10000, "sha256": {"train_images": "0" * 64}}


def epoch(seconds: float, loss: float = 0.5, **figures: Any) -> dict[str, Any]:
    """An epoch that spends 80% of its time in training. A quarter of that is waiting."""
    return {
        "epoch_s": seconds,
        "train_s": 0.8 * seconds,
        "eval_s": 0.2 * seconds,
        "data_wait_s": 0.2 * seconds,
        "data_wait_pct": 25.0,
        "compute_s": 0.5 * seconds,
        "images_per_s": 60 / (0.8 * seconds),
        "train_loss": loss,
        "eval_loss": loss,
        "eval_acc": 90.0,
        "host_peak_mib": 700.0,
        "gpu_peak_mib": None,
        "ended_at": 0.0,
        **figures,
    }


def write_run(
    folder: Path,
    loader: str = "ram",
    batch_size: int = 100,
    times: tuple[float, ...] = (9.0, 2.0, 4.0),
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    """Write the records of a run; `config` has full keys."""
    values: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": 42,
        "repeat": 1,
        "model": {"name": "vit", "depth": 6},
        "data": {
            "root": "/data",
            "drop_last": False,
            "loader": {"name": loader, **({"num_workers": 0} if loader == "disk" else {})},
        },
    }
    for key, value in (config or {}).items():
        node = values
        *groups, last = key.split(".")
        for group in groups:
            node = node[group]
        node[last] = value
    content = {
        "status": "completed",
        "config": values,
        "began_at": 0.0,
        "ended_at": 0.0,
        "epochs": [epoch(time) for time in times],
        "dataset": DATASET,
        "environment": ENVIRONMENT | (environment or {}),
        "eval_split": "test",
        **result,
    }
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "result.json").write_text(json.dumps(content))
    return folder


def timed_run(loader: str, *times: float, repeat: int = 1, seed: int = 42, **record: Any) -> dict[str, Any]:
    """A run with a first epoch of 9 s and epochs of the given times."""
    config = {"repeat": repeat, "seed": seed, **record.pop("config", {})}
    return {"loader": loader, "times": (9.0, *times), "config": config, **record}


def rounds(count: int, **loaders: float) -> Records:
    """Rounds on a machine that slows down, by a tenth of each loader's time in each round."""
    return [
        timed_run(loader, time * (1 + repeat / 10), repeat=repeat)
        for repeat in range(1, count + 1)
        for loader, time in loaders.items()
    ]


def three_rounds(*records: dict[str, Any]) -> Records:
    """The same runs in each of three rounds."""
    return [{**record, "config": {**record["config"], "repeat": repeat}} for repeat in range(3) for record in records]


def write(folder: Path, records: Records) -> Path:
    """Write the records of several runs."""
    for index, record in enumerate(records):
        write_run(folder / str(index), **record)
    return folder


def compared(*folders: Path) -> list[Comparison]:
    return compare([read_run(folder) for folder in find_runs(folders)])


def the_only(folder: Path) -> Comparison:
    (comparison,) = compared(folder)
    return comparison


def table_of(folder: Path) -> list[dict[str, str]]:
    tables = (build_table(the_only(folder), folder, other_metrics) for other_metrics in (False, True))
    return [row | other for row, other in zip(*tables, strict=True)]
