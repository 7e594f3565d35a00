"""What a record says about machine, software and source code."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import REPOSITORY
from vitmnist.tracking import environment as environment_module
from vitmnist.tracking.environment import HardwareFigures, describe_environment, source_state

CPU = torch.device("cpu")


def test_gpu_utilisation_is_the_mean_of_all_samples_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver replaced: the machine may have no GPU. It keeps only the last two samples."""
    samples: list[SimpleNamespace] = []

    def read(handle: object, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
        return 0, [sample for sample in samples[-2:] if sample.timeStamp > since]

    def add(seconds: float, percent: int) -> None:
        time_stamp = int((started + seconds) * 1_000_000)
        samples.append(SimpleNamespace(timeStamp=time_stamp, sampleValue=SimpleNamespace(uiVal=percent)))

    monkeypatch.setattr(environment_module, "gpu_handle", lambda device: "handle")
    monkeypatch.setattr(environment_module.pynvml, "nvmlDeviceGetSamples", read)
    started = time.time()
    add(-1.0, 100)  # before the run
    figures = HardwareFigures(CPU)
    assert figures.gpu_util_pct() is None
    add(1.0, 10)
    add(2.0, 30)
    assert figures.gpu_util_pct() == figures.gpu_util_pct() == 20.0, "also of an epoch without a new sample"
    add(3.0, 80)
    assert figures.gpu_util_pct() == 40.0


def test_the_environment_has_what_decides_speed_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as torch does
    monkeypatch.setenv("NCCL_API_KEY", "never to be written down")
    environment = json.loads(json.dumps(describe_environment(CPU)))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert environment["git_commit"] == (head.stdout.strip() or None)
    assert environment["gpu"] is None
    assert environment["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert environment["env"]["OMP_NUM_THREADS"] == "1"
    assert not {"NCCL_API_KEY", "PATH", "HOME", "KMP_DUPLICATE_LIB_OK"} & environment["env"].keys()


def test_the_commit_of_the_source_tree_and_its_changes_are_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    assert set(source_state(tmp_path).values()) == {None}
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    state = source_state(tmp_path)
    assert (len(state["git_commit"]), state["git_dirty"]) == (40, False)
    (tmp_path / "new.py").touch()
    assert source_state(tmp_path) == state | {"git_dirty": True}
    assert set(source_state(tmp_path / ".git").values()) == {None}
