"""What a record says about machine, software and source code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import REPOSITORY
from vitmnist.tracking import hardware
from vitmnist.tracking.environment import describe_environment, source_state
from vitmnist.tracking.hardware import HardwareFigures

CPU = torch.device("cpu")


def test_a_memory_peak_excludes_earlier_jobs_of_the_process() -> None:
    first = HardwareFigures(CPU)
    if first.host_peak_mib() is None:
        pytest.skip("this system does not let a process reset its peak")
    block = torch.ones(300 * hardware.MIB, dtype=torch.uint8)
    high = first.host_peak_mib()
    del block
    assert HardwareFigures(CPU).host_peak_mib() < high - 250


def test_gpu_utilisation_is_the_mean_of_the_samples_since_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver replaced: the machine may have no GPU."""
    samples = [(second * 1_000_000, SimpleNamespace(uiVal=percent)) for second, percent in ((1, 10), (2, 30), (3, 80))]

    def read(handle: object, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
        return 0, [SimpleNamespace(sampleValue=value) for time, value in samples if time > since]

    monkeypatch.setattr(hardware, "gpu_handle", lambda device: "handle")
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetSamples", read)
    figures = HardwareFigures(CPU)
    assert [figures.gpu_util_pct(since) for since in (0.5, 1.5, 3.0)] == [40.0, 55.0, None]


def test_the_environment_has_what_decides_speed_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as torch does
    monkeypatch.setenv("NCCL_API_KEY", "never to be written down")
    monkeypatch.setenv("HF_TOKEN", "nor this")
    environment = json.loads(json.dumps(describe_environment(CPU)))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert environment["git_commit"] == (head.stdout.strip() or None)
    assert environment["gpu"] is None
    assert environment["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}.items() <= environment["env"].items()
    assert not {"NCCL_API_KEY", "HF_TOKEN", "PATH", "HOME", "KMP_DUPLICATE_LIB_OK"} & environment["env"].keys()
    if environment["cpu_capability"].startswith("AVX"):
        assert "avx2" in environment["cpu_flags"]
    if torch.backends.mkl.is_available():
        assert "Math Kernel Library Version 20" in environment["blas"]


def test_every_state_of_the_source_tree_has_its_own_checksum(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    def checksum() -> str | None:
        state = source_state(tmp_path)
        assert state["git_dirty"] == (state["git_diff_sha256"] is not None)
        return state["git_diff_sha256"]

    assert set(source_state(tmp_path).values()) == {None}
    git("init", "--quiet")
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    states = [checksum()]
    assert states == [None]
    for name, content in (("code.py", "a = 2\n"), ("code.py", "a = 3\n"), ("new.py", ""), ("new.py", "b = 1\n")):
        (tmp_path / name).write_text(content)
        states.append(checksum())
        assert checksum() == states[-1]
    (tmp_path / "new.py").rename(tmp_path / "renamed.py")
    states.append(checksum())
    assert len({*states}) == len(states)
    git("add", "code.py")
    (tmp_path / "ignored").touch()
    assert checksum() == states[-1]
