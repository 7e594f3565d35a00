"""The figures that a run leaves are whole, and true of the run alone."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import REPOSITORY
from vitmnist.runtime.files import write_whole
from vitmnist.tracking import hardware
from vitmnist.tracking.environment import commit_of, describe_environment
from vitmnist.tracking.hardware import HardwareFigures
from vitmnist.tracking.result import EpochRecord, Result
from vitmnist.training.metrics import PassFigures

CPU = torch.device("cpu")
PASS = PassFigures(images=100, loss=1.0, accuracy=50.0, seconds=4.0, data_wait_s=1.0, compute_s=2.5, save_s=0.5)
RESULT = {"overrides": [], "choices": {}}


def record(number: int, seconds: float, accuracy: float) -> EpochRecord:
    return EpochRecord.of(
        number, replace(PASS, seconds=seconds), replace(PASS, accuracy=accuracy), None, None, None, []
    )


def test_medians_leave_the_first_epoch_out() -> None:
    result = Result(**RESULT, epochs=[record(0, 90.0, 10.0), record(1, 4.0, 30.0), record(2, 6.0, 20.0)])
    summary = result.summary()
    assert summary["epoch_s_median"] == (9.0 + 11.0) / 2  # each with an evaluation of 4 s and two saves of 0.5 s
    assert summary["images_per_s"] == pytest.approx((100 / 4 + 100 / 6) / 2)
    assert summary["data_wait_pct"] == pytest.approx((100 / 4 + 100 / 6) / 2)
    assert (summary["eval_acc_last"], summary["eval_acc_best"]) == (20.0, 30.0)
    assert Result(**RESULT, epochs=[record(0, 90.0, 10.0)]).summary()["epoch_s_median"] == 95.0


def test_a_figure_that_an_older_record_lacks_is_missing() -> None:
    kept = asdict(record(0, 90.0, 10.0))
    assert EpochRecord.kept(kept).save_s == 1.0
    del kept["save_s"]
    assert EpochRecord.kept(kept).save_s is None


def test_a_result_without_epochs_is_whole_json(tmp_path: Path) -> None:
    Result(**RESULT, error="why").write(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["error"], result["epochs"]) == ("failed", "why", [])


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_whole(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("result.json", b"old")]


def test_a_peak_of_memory_does_not_outlive_its_job() -> None:
    first = HardwareFigures(CPU)
    if first.host_peak_mib() is None:
        pytest.skip("this system does not let a process reset its peak")
    block = torch.ones(300 * hardware.MIB, dtype=torch.uint8)
    high = first.host_peak_mib()
    del block
    assert HardwareFigures(CPU).host_peak_mib() < high - 250


def test_gpu_use_is_the_mean_of_the_samples_since_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver replaced, which this machine need not have."""

    def sample(second: int, percent: int) -> SimpleNamespace:
        return SimpleNamespace(timeStamp=second * 1_000_000, sampleValue=SimpleNamespace(uiVal=percent))

    buffer = [sample(1, 10), sample(2, 30), sample(3, 80)]

    def samples(handle: object, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
        return 0, [item for item in buffer if item.timeStamp > since]

    monkeypatch.setattr(hardware, "gpu_handle", lambda device: "handle")
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetSamples", samples)
    figures = HardwareFigures(CPU)
    assert figures.gpu_util_pct(since=0.5) == 40.0
    assert figures.gpu_util_pct(since=1.5) == 55.0
    assert figures.gpu_util_pct(since=3.0) is None


def test_the_environment_names_the_commit_of_the_source_tree() -> None:
    environment = describe_environment(CPU)
    root = REPOSITORY
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    assert environment["git_commit"] == (head.stdout.strip() or None)
    assert environment["gpu"] is None
    json.dumps(environment)


def test_the_environment_names_what_decides_the_speed_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as torch does
    monkeypatch.setenv("NCCL_API_KEY", "never to be written down")
    monkeypatch.setenv("HF_TOKEN", "nor this")
    recorded = describe_environment(CPU)
    assert recorded["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}.items() <= recorded["env"].items()
    assert not {"NCCL_API_KEY", "HF_TOKEN", "PATH", "HOME", "KMP_DUPLICATE_LIB_OK"} & recorded["env"].keys()
    if recorded["cpu_capability"].startswith("AVX"):
        assert "avx2" in recorded["cpu_flags"]
        assert recorded["cpu_flags"] == sorted(recorded["cpu_flags"])
    if torch.backends.mkl.is_available():
        assert re.match(r"mkl \d{4}\.\d", recorded["blas"])


def test_two_states_of_the_source_tree_are_told_apart(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    def checksum() -> str | None:
        recorded = commit_of(tmp_path)
        assert recorded["git_dirty"] == (recorded["git_diff_sha256"] is not None)
        return recorded["git_diff_sha256"]

    assert commit_of(tmp_path) == {"git_commit": None, "git_dirty": None, "git_diff_sha256": None}
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
