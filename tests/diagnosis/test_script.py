"""`python -m vitmnist.diagnose` over small scripts: true figures, and scripts that behave as they do without it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from vitmnist.diagnosis.advice import advise
from vitmnist.diagnosis.verdict import verdict

SLOW_DATA = """
import os, signal, sys, time
os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is imported
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Slow(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        time.sleep(0.005)
        return index

class Stream(IterableDataset):
    def __iter__(self):
        for index in range(24):
            time.sleep(0.001)
            yield index

def train(loader, epochs=2):
    for epoch in range(epochs):
        for batch in loader:
            time.sleep(0.002)
"""


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)


def diagnose(folder: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """Observe a script; returns the ended process and the JSON."""
    (folder / "mine.py").write_text(script)
    ended = start(folder, "-m", "vitmnist.diagnose", "--json=report.json", *options, "mine.py", *arguments)
    assert (folder / "report.json").exists(), ended.stderr
    return ended, json.loads((folder / "report.json").read_text())


def test_figures_of_each_loader_are_true_and_consistent(tmp_path: Path) -> None:
    """In the main process and in forked workers, map-style and iterable; one loader per epoch is one block."""
    script = f"""{SLOW_DATA}
train(DataLoader(Slow(), batch_size=2))
train(DataLoader(Slow(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
train(DataLoader(Stream(), batch_size=2))
for epoch in range(2):
    for batch in DataLoader(Slow(), batch_size=4):
        pass
iterator = iter(DataLoader(Slow(), batch_size=2, num_workers=1))
assert len(iterator) == 12 and iter(iterator) is iterator and iterator._num_workers == 1
"""
    ended, report = diagnose(tmp_path, script, "--steps=15", "--warm-up=3", "--fail-above=95")
    assert ended.returncode == 1  # the last loader waits all the time
    assert "failed: waiting exceeds --fail-above 95%: mine.py:" in ended.stderr
    assert report["complete"]
    assert report["exit_code"] == 0
    main, workers, stream, rebuilt, untouched = report["loaders"]
    for figures in (main, workers, stream):
        assert (figures["steps"], figures["complete"]) == (15, True)
        assert figures["step_s"] >= 0.002
        assert figures["waiting_s"] + figures["step_s"] == pytest.approx(figures["batch_s"])
        assert figures["waiting_pct"] == pytest.approx(100 * figures["waiting_s"] / figures["batch_s"])
        assert len(figures["first_batches_s"]) == 2
        assert 0 < figures["overhead_s"] < figures["step_s"]
        assert figures["verdict"] == verdict(figures["batch_s"], figures["waiting_s"])
    assert 0.010 <= main["t1_s"] <= main["waiting_s"]
    assert main["first_batches_s"][0] >= 0.010
    assert workers["t1_s"] >= 0.010
    assert workers["t1_per_worker_s"] == workers["t1_s"] / 2
    assert stream["t1_s"] >= 0.002
    assert "from_dataloader" in main["advice"][0]["text"]
    assert "from_dataloader" not in stream["advice"][0]["text"]  # it is for map-style data sets
    assert rebuilt["batch_size"] == 4
    assert len(rebuilt["first_batches_s"]) == 2
    assert untouched["verdict"] is None


def test_a_script_sees_its_own_arguments_and_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its spawned workers, which import `__main__` again; T1 is unknown then."""
    script = """
import os, sys

class Numbers:
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__, sys.modules["__main__"].Numbers is Numbers)
    if os.environ.get("OBSERVED"):
        from torch.utils.data import DataLoader
        for batch in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
            pass
"""
    arguments = ("--steps", "7", "-m", "x y")
    (tmp_path / "mine.py").write_text(script)
    expected = start(tmp_path, "mine.py", *arguments)
    monkeypatch.setenv("OBSERVED", "1")
    ended, report = diagnose(tmp_path, script, "--warm-up=2", arguments=arguments)
    assert "x y" in expected.stdout
    assert ended.stdout == expected.stdout
    assert report["reason"] == "the script ended after 10 of the 200 steps to observe"
    (figures,) = report["loaders"]
    assert figures["t1_s"] is None
    assert "T1          unknown: workers started by spawn" in ended.stderr


def test_a_module_runs_as_by_python_m_and_stop_ends_it(tmp_path: Path) -> None:
    """A package runs its `__main__`, and is ended after its `finally` blocks."""
    script = f"""import sys
print(sys.argv[0], sys.argv[-1], sys.path[0], __file__, __name__, __package__, __spec__.name)
if sys.argv[1] == "--stop":
    sys.exit()
{SLOW_DATA}
try:
    train(DataLoader(Slow(), batch_size=2), epochs=1000)
finally:
    print("finally")
"""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(script)
    expected = start(tmp_path, "-m", "package", "--stop", "x")
    options = ("--steps=5", "--warm-up=2", "--stop")
    ended = start(tmp_path, "-m", "vitmnist.diagnose", *options, "-m", "package", "--train", "x")
    assert ended.returncode == 0
    assert expected.stdout
    assert ended.stdout == expected.stdout + "finally\n"
    assert "observed    5 steps after a warm-up of 2" in ended.stderr


def test_an_exception_is_printed_as_without_us_and_what_was_seen_reported(tmp_path: Path) -> None:
    """The traceback has no frame of ours, also of a sample that fails."""
    script = f"""{SLOW_DATA}
class Broken(Slow):
    def __getitem__(self, index):
        return 1 / (6 - index)
train(DataLoader(Broken(), batch_size=2))
"""
    ended, report = diagnose(tmp_path, script, "--fail-above=0")
    traceback, _, printed = ended.stderr.partition("\n\n")
    assert traceback.startswith(f'Traceback (most recent call last):\n  File "{tmp_path / "mine.py"}", line ')
    assert traceback.endswith("ZeroDivisionError: division by zero")
    assert "diagnos" not in traceback.replace(str(tmp_path), "")
    assert ended.returncode == report["exit_code"] == 1
    assert not report["complete"]
    assert "no loader had enough steps: 3 at most" in report["reason"]
    assert "lower --warm-up" in printed
    assert report["loaders"][0]["waiting_pct"] is None


@pytest.mark.parametrize(
    ("last_line", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -2),  # Ctrl-C
        ("invalid syntax", 1),
    ],
)
def test_exit_codes_are_the_scripts_own(tmp_path: Path, last_line: str, code: int) -> None:
    ended, report = diagnose(tmp_path, f"import os, signal, sys\n{last_line}\n", "--fail-above=0")
    expected = start(tmp_path, "mine.py")
    assert ended.returncode == expected.returncode == code
    assert report["exit_code"] == (130 if code == -2 else code)
    assert ended.stderr.startswith(expected.stderr)
    assert not report["complete"]
    assert "incomplete: no DataLoader was iterated in this process" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script? Type SCRIPT.py or -m package.module"),
        (["missing.py"], "missing.py: No such file or directory; type the path of a Python file"),
        (["-m", "missing.module"], "-m missing.module: there is no such module"),
        (["--stepz", "3", "mine.py"], "unrecognized arguments: --stepz"),
        (["--steps", "0", "mine.py"], "argument --steps: '0' is not a whole number of at least 1"),
        (["--fail-above", "many", "mine.py"], "argument --fail-above: 'many' is not a number from 0 to 100"),
        (["--json", "missing/report.json", "mine.py"], "the folder missing does not exist; create it first"),
    ],
)
def test_a_bad_command_line_is_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = start(tmp_path, "-m", "vitmnist.diagnose", *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_is_not_imported_in_place_of_the_function() -> None:
    with pytest.raises(ImportError, match="from vitmnist import diagnose"):
        importlib.import_module("vitmnist.diagnose")


def test_verdicts_name_the_limit_and_what_can_be_gained() -> None:
    assert verdict(0.022, 0.020) == (
        "input-bound: 91% of the time is spent waiting for data; without waiting a batch would take 2.0 ms instead of "
        "22.0 ms, 11 times faster"
    )
    assert verdict(0.020, 0.010).startswith("balanced: 50% of")
    assert verdict(0.020, 0.0004) == (
        "compute-bound: 2% of the time is spent waiting for data; no loader can make it more than 1.02 times faster"
    )


@pytest.mark.parametrize(
    ("changed", "cores", "expected"),
    [
        ({"num_workers": 0}, 8, "try num_workers=5 (8 cores available), or use vitmnist.from_dataloader(loader)"),
        ({"num_workers": 0}, 2, "try num_workers=2 (2 cores available)"),
        ({"num_workers": 2}, 8, "slower than the step of 2.0 ms; try num_workers=5"),
        ({"num_workers": 2}, 2, "none of the 2 cores is free; use vitmnist.from_dataloader(loader)"),
        ({"num_workers": 2, "t1_per_worker_s": 0.001}, 2, "try a larger prefetch_factor"),
        ({"num_workers": 2, "t1_s": None, "t1_per_worker_s": None}, 2, "T1 is unknown; measure the alternatives"),
        ({"verdict": "compute-bound: …", "waiting_pct": 1.0}, 2, "the loader is not the problem: 99% of the time"),
    ],
)
def test_advice_follows_from_the_figures(changed: dict[str, Any], cores: int, expected: str) -> None:
    measured = {"batch_s": 0.012, "waiting_s": 0.010, "step_s": 0.002, "waiting_pct": 83.0, "verdict": "input-bound: …"}
    made = {"t1_s": 0.010, "t1_per_worker_s": 0.005, "num_workers": 2, "is_map_style": True}
    epochs = {"first_epoch_steps": 11, "first_batches_s": [0.2, 0.120, 0.120], "persistent_workers": False}
    first, *more = advise({**measured, **made, **epochs, **changed}, cores, "python -m vitmnist.diagnose mine.py")
    assert expected in first.text
    has_workers = changed.get("num_workers", 2) > 0
    assert ["the first batch of an epoch takes 120 ms, 50% of the epoch" in advice.text for advice in more] == (
        [True] * has_workers
    )
