"""Training runs begin their epochs early, and can be stopped meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Train, assert_same_run
from vitmnist import run as run_module
from vitmnist.data.loaders.disk import DataLoaderPool
from vitmnist.runtime.leftovers import left_since, running
from vitmnist.runtime.signals import UNFINISHED

Begun = list[tuple[range, int]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The epochs and the start of each run of `disk`."""
    runs: Begun = []
    original = DataLoaderPool.run_epochs

    def run_epochs(self: DataLoaderPool, numbers: range, start: int):
        runs.append((numbers, start))
        return original(self, numbers, start)

    monkeypatch.setattr(DataLoaderPool, "run_epochs", run_epochs)
    return runs


def test_a_training_run_begins_its_epochs_ahead_and_an_evaluation_none(
    quick: list[str], train_here: Train, begun: Begun
) -> None:
    ended = train_here(*quick, "data/loader=disk", "data.loader.num_workers=1", "epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert begun == [(range(3), 0), *[(range(1), 0)] * 3]


PREFETCH = "data/loader=prefetch data/loader@data.loader.base=disk"


@pytest.mark.parametrize("loader", ["data/loader=disk", pytest.param(PREFETCH, marks=pytest.mark.slow)])
def test_a_stop_while_the_next_epoch_is_begun_leaves_no_process(
    loader: str, quick: list[str], train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*quick, *loader.split(), "epochs=3"]
    assert train_here(*arguments, "hydra.run.dir=whole").returncode == 0
    before = running()
    evaluate = run_module.evaluate

    def stopped(*parts: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "evaluate", stopped)
        assert train_here(*arguments, "hydra.run.dir=parts").returncode == UNFINISHED
    assert not left_since(before)
    assert train_here("resume=parts").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
