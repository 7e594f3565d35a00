"""A script behaves under `vitmnist diagnose` as it does without it."""

import signal
from pathlib import Path

import pytest

from tests.conftest import CallHere
from tests.support.processes import run_python
from tests.support.scripts import SLOW_DATA, diagnose
from vitmnist.diagnosis.script_report import NO_BATCHES, NO_LOADER


def test_a_script_sees_its_own_arguments_and_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do its spawned workers, which import `__main__` again."""
    script = """
import atexit, os, pickle, sys

class Numbers:
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    def typed(value: int): ...
    print(typed.__annotations__)  # They are not those of a file with __future__ imports.
    print(sys.argv[1:], sys.path[0], __file__, __name__, __spec__)
    print(sys.modules["__main__"].Numbers is Numbers)
    atexit.register(lambda: print(pickle.dumps(Numbers())))  # `__main__` stays until the end
    if os.environ.get("OBSERVED"):
        from torch.utils.data import DataLoader
        for batch in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
            pass
"""
    arguments = ("--steps", "7", "-m", "x y")
    (tmp_path / "mine.py").write_text(script)
    expected = run_python("mine.py", *arguments, folder=tmp_path)
    monkeypatch.setenv("OBSERVED", "1")
    process, report = diagnose(tmp_path, script, "--warm-up=2", "--steps=200", arguments=arguments, fresh=True)
    assert "x y" in expected.stdout
    assert process.stdout == expected.stdout
    assert report["steps"] == 10


@pytest.mark.needs("fork")
def test_a_forked_child_is_neither_stopped_nor_reported(tmp_path: Path) -> None:
    script = f"""{SLOW_DATA}
child = os.fork()
if not child:
    train(DataLoader(Slow(), batch_size=2))
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
train(DataLoader(Slow(), batch_size=2), epochs=1000)
"""
    process, report = diagnose(tmp_path, script, "--warm-up=1", "--steps=3", "--stop")
    assert (process.stdout, process.returncode, report["stopped"]) == ("5\n", 0, True)
    assert process.stderr.count("vitmnist diagnose: ") == 1


def test_a_module_runs_as_by_python_m_and_stop_ends_it(tmp_path: Path) -> None:
    """A package runs its `__main__`, and its `finally` blocks run before the end."""
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
    expected = run_python("-m", "package", "--stop", "x", folder=tmp_path)
    options = ("--steps=5", "--warm-up=2", "--stop")
    process = run_python("-m", "vitmnist", "diagnose", *options, "-m", "package", "--train", "x", folder=tmp_path)
    assert process.returncode == 0
    assert expected.stdout
    assert process.stdout == expected.stdout + "finally\n"
    assert "script: 5 batches after a warm-up of 2 in " in process.stderr


def test_an_exception_is_printed_as_without_vitmnist_and_the_report_follows(tmp_path: Path) -> None:
    """The traceback begins with the script, and has the cause of the exception."""
    script = f"""{SLOW_DATA}
class Broken(Slow):
    def __getitem__(self, index):
        return 1 / (6 - index)
try:
    train(DataLoader(Broken(), batch_size=2))
except ZeroDivisionError as error:
    raise RuntimeError("cannot train") from error
"""
    process, report = diagnose(tmp_path, script)
    traceback, _, printed = process.stderr.partition("\n\nvitmnist diagnose: ")
    assert traceback.startswith(f'Traceback (most recent call last):\n  File "{tmp_path / "mine.py"}", line ')
    assert "ZeroDivisionError: division by zero" in traceback
    assert traceback.endswith("RuntimeError: cannot train")
    assert process.returncode == report["exit_code"] == 1
    assert (report["incomplete"], report["loaders"]) == (NO_BATCHES, [])
    assert "lower --warm-up" in printed


@pytest.mark.parametrize(
    ("last_line", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        # Ctrl-C. A process in the background ignores it by default.
        pytest.param(
            "signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)",
            130,
            marks=pytest.mark.needs("POSIX signals"),
        ),
        ("invalid syntax", 1),
    ],
)
def test_exit_codes_are_the_scripts_own(tmp_path: Path, last_line: str, code: int) -> None:
    process, report = diagnose(tmp_path, f"import os, signal, sys\n{last_line}\n")
    expected = run_python("mine.py", folder=tmp_path)
    assert process.returncode == report["exit_code"] == code
    assert code == (130 if expected.returncode == -signal.SIGINT else expected.returncode)
    assert process.stderr.startswith(expected.stderr)
    assert report["incomplete"] == NO_LOADER
    assert "incomplete: no DataLoader was iterated in this process" in process.stderr


def test_a_dataset_with_a_thread_pool_is_tried_before_the_pool_ends(tmp_path: Path) -> None:
    script = f"""{SLOW_DATA}
import concurrent.futures, torch
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # Seconds that a blocked worker has to end
candidates.WORKER_TIMEOUT_S = 2.0  # A forked worker waits for the threads of the pool, which it lacks.
pool = concurrent.futures.ThreadPoolExecutor()
class Pooled(Slow):
    def __getitem__(self, index):
        return torch.full((3,), pool.submit(super().__getitem__, index).result())
train(DataLoader(Pooled()))
sys.exit()
"""
    process, report = diagnose(tmp_path, script, "--warm-up=0", fresh=True)
    assert process.returncode == 0
    (errors,) = ({timing["name"]: timing["error"] for timing in loader["timings"]} for loader in report["loaders"])
    assert (errors["as it is"], errors["from_dataloader"]) == (None, None)
    assert "timed out" in errors["num_workers=2"]


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, [], "no script; pass SCRIPT.py or -m package.module"),
        (1, ["missing.py"], "missing.py: there is no such Python file"),
        (1, ["-m", "missing.module"], "-m missing.module: No module named 'missing'"),
        (2, ["--stepz", "3", "mine.py"], "unrecognized arguments: --stepz"),
        (1, ["--json", "missing/report.json", "mine.py"], "error: missing: No such file or directory"),
    ],
)
def test_a_bad_command_line_is_explained(call_here: CallHere, code: int, arguments: list[str], message: str) -> None:
    process = call_here("diagnose", *arguments)
    assert process.returncode == code
    assert message in process.stderr
    assert "Traceback" not in process.stderr
