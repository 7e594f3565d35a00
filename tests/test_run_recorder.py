"""`RunRecorder` records how a run ended, and continues the record of a resumed one."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import result_of
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, RunInterrupted
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.run_recorder import RunRecorder
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.world import SINGLE_PROCESS
from vitmnist.training.progress import EpochProgress

CPU = torch.device("cpu")


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    config, monitor = validate(Config, compose(["logger=[]"])), Monitor(build_epoch_table()["eval_acc"])
    return RunRecorder(config, tmp_path, [], monitor, CPU, SINGLE_PROCESS)


def end_with(error: BaseException, recorder: RunRecorder, *calls: Callable[[], object]) -> None:
    """Call functions within a run that then ends with an error."""
    with pytest.raises(type(error), match="wrong"), recorder.record_outcome(StopSignal()):  # noqa: PT012
        for call in calls:
            call()
        raise error


def test_a_failure_is_recorded_only_after_training_has_begun(recorder: RunRecorder, tmp_path: Path) -> None:
    """A resumed run that is stopped before keeps its records."""
    end_with(ConfigError("wrong"), recorder)
    recorder.config.resume = "run"
    end_with(RunInterrupted("wrong"), recorder)
    assert not [*tmp_path.iterdir()]
    end_with(ConfigError("wrong"), recorder, recorder.begin)
    result = result_of(tmp_path)
    assert (result["status"], result["error"], result["exit_code"]) == ("failed", "wrong", 1)


def test_a_write_error_of_the_outcome_does_not_hide_the_error_of_the_run(
    recorder: RunRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end_with(ConfigError("wrong"), recorder, recorder.begin, (tmp_path / "result.json").mkdir)
    assert "cannot write the records: " in caplog.text


def test_the_epochs_of_a_checkpoint_are_continued(recorder: RunRecorder, tmp_path: Path) -> None:
    """A row of `epochs.csv` that is newer than the checkpoint is dropped."""
    metrics = dict.fromkeys(build_epoch_table(), 1.0)
    (tmp_path / "epochs.csv").write_text("epoch\n0\n1\n2\n")
    recorder.continue_from([{**metrics, "epoch": 0, "first_of_start": True, "ended_at": 1.0, "steps": []}])
    with recorder.record_outcome(StopSignal()):
        recorder.begin()
        evaluation = SimpleNamespace(metrics={"eval_s": 3.0}, save_s=4.0)
        recorder.add_epoch(EpochProgress(1, EpochSampler(23, 8, 3), CPU), metrics, evaluation, "0123456789")
        recorder.write_epoch(lambda epoch: {}, is_last=True)
    result = result_of(tmp_path)
    assert (result["status"], result["resumed"]) == ("completed", True)
    assert [(epoch["epoch"], epoch["epoch_s"]) for epoch in result["epochs"]] == [(0, 1), (1, 1 + 3 + 1 + 4)]
    rows = (tmp_path / "epochs.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == ["0", "1"]
