"""`result.json` is complete, and its summary follows from the table of metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitmnist.tracking.metrics import METRICS, EpochRecord
from vitmnist.tracking.result import Result


def epoch(**metrics: float) -> EpochRecord:
    """A record with the given metrics; null for the others."""
    return {metric.name: None for metric in METRICS} | {"eval_acc": 50.0, "steps": []} | metrics


def test_the_summary_has_medians_maxima_and_last_values() -> None:
    epochs = [
        epoch(epoch_s=90.0, data_wait_pct=90.0, eval_acc=10.0, host_peak_mib=700.0),
        epoch(epoch_s=4.0, data_wait_pct=1.0, eval_acc=30.0, host_peak_mib=900.0),
        epoch(epoch_s=6.0, data_wait_pct=2.0, eval_acc=20.0, host_peak_mib=800.0),
    ]
    summary = Result(overrides=[], choices={}, epochs=epochs, setup_s=1.5).summary()
    assert (summary["epoch_s_median"], summary["data_wait_pct_median"]) == (5.0, 1.5)  # without the first epoch
    assert (summary["eval_acc_last"], summary["eval_acc_best"], summary["host_peak_mib_max"]) == (20.0, 30.0, 900.0)
    assert (summary["gpu_peak_mib_max"], summary["setup_s"], summary["compile_s"]) == (None, 1.5, None)
    assert Result(overrides=[], choices={}, epochs=epochs[:1]).summary()["epoch_s_median"] == 90.0


def test_a_run_that_fails_before_its_first_epoch_has_a_complete_record(tmp_path: Path) -> None:
    Result(overrides=["a=1"], choices={}, error="why").write(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["error"], result["epochs"], result["overrides"]) == ("failed", "why", [], ["a=1"])
    assert set(result["summary"].values()) == {None}
    assert result["began_at"] <= result["ended_at"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(overrides=[], choices={})
    result.write(tmp_path)
    content = (tmp_path / "result.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        result.write(tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("result.json", content)]
