"""`profile=true` leaves a trace and a table of operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import PLAIN, Train


@pytest.mark.parametrize(("batch_size", "steps"), [(2, 5), (23, 1)])  # epochs of 12 steps, and of one
def test_a_profile_is_a_trace_and_a_table(
    train_here: Train, tiny_root: Path, tmp_path: Path, batch_size: int, steps: int
) -> None:
    quick = ["data/dataset=kmnist", f"data.root={tiny_root}", "model=cnn", "device=cpu", "epochs=1", PLAIN]
    ended = train_here(*quick, f"batch_size={batch_size}", "profile=true", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert f"{steps} steps were profiled, which makes them slower; see here/profile" in ended.stdout
    trace = json.loads((tmp_path / "here" / "profile" / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert len({name for name in names if name.startswith("ProfilerStep")}) == steps
    table = (tmp_path / "here" / "profile" / "operations.txt").read_text()
    assert "Self CPU" in table
    assert "convolution_backward" in table
