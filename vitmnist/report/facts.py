"""Machine, software and data of runs, as the report names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitmnist.report.runs import Run

NOTHING = "–"
# Titles by the keys of `environment`.
MACHINE = {"host": "host", "cpu": "processor", "cpu_count": "cores"}
SOFTWARE = {
    "device": "device",
    "ranks": "processes",
    "torch_threads": "torch threads",
    "cpu_capability": "CPU capability",
    "cpu_flags": "instruction sets",
    "blas": "BLAS",
    "env": "environment variables",
    "gpu": "GPU",
    "gpu_driver": "driver",
    "platform": "system",
    "python": "Python",
    "torch": "torch",
    "torchvision": "torchvision",
    "cuda": "CUDA",
    "git_commit": "commit",
    "git_dirty": "uncommitted changes",
    "git_diff_sha256": "SHA-256 of the changes",
    "vitmnist": "vitmnist",
}


def facts_of(run: Run) -> dict[str, str]:
    """Where and with what a run ran."""
    known = {**run.environment, **(run.result.get("distributed") or {}), "device": run.result.get("device")}
    return {key: fact_of(known.get(key) if run.environment else None) for key in (*MACHINE, *SOFTWARE)}


def fact_of(value: Any) -> str:
    """A value of `environment` for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():  # a commit, a checksum
        return value[:12]
    if isinstance(value, Mapping):
        return fact_of([f"{key}={item}" for key, item in value.items()])
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    return NOTHING if value is None else str(value)


def data_facts(runs: Sequence[Run]) -> dict[str, str]:
    """Name, sizes and checksums of the data set."""
    dataset = next(filter(None, (run.result.get("dataset") for run in runs)), None)
    if not dataset:
        return {}
    train, test = (fact_of(dataset.get(key)) for key in ("train_size", "test_size"))
    held_out = {bool(data.get("holdout")) for run in runs if isinstance(data := run.config.get("data"), Mapping)}
    split = "evaluated" if len(held_out) > 1 else "held-out" if True in held_out else "test"
    sums = ", ".join(f"{name} {value[:12]}" for name, value in (dataset.get("sha256") or {}).items())
    return {
        "data": f"{fact_of(dataset.get('name'))}, {train} training and {test} {split} images",
        "SHA-256": f"{sums} (first 12 digits)",
    }


def place(facts: Mapping[str, str]) -> str:
    """Machine and data, in a line."""
    images = facts.get("SHA-256", "").partition(",")[0]
    known = [*(facts.get(title) for title in ("GPU", "processor", "host", "data")), images]
    return ", ".join(filter(None, known)) or "machine and data not known"
