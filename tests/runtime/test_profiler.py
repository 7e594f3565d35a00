"""`profile=true` leaves a trace and a table of operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Printed


@pytest.mark.parametrize(("batch_size", "steps"), [(2, 5), (23, 1)])  # epochs of 12 steps, and of one
def test_a_profile_is_a_trace_and_a_table(
    succeed: Printed, quick: list[str], tmp_path: Path, batch_size: int, steps: int
) -> None:
    profiled = [f"batch_size={batch_size}", "profile=true", "device=cpu", "epochs=1", "hydra.run.dir=here"]
    printed = succeed(*quick, *profiled)
    assert f"{steps} steps were profiled, which makes them slower; see here/profile" in printed
    trace = json.loads((tmp_path / "here" / "profile" / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert len({name for name in names if name.startswith("ProfilerStep")}) == steps
    table = (tmp_path / "here" / "profile" / "operations.txt").read_text()
    assert "Self CPU" in table
    assert "convolution_backward" in table
