"""`train.py` in processes forked from one that has imported torch: a start takes milliseconds instead of seconds."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest

SYSTEM = {
    "fork": "fork" in multiprocessing.get_all_start_methods(),
    "POSIX signals": hasattr(signal, "SIGKILL"),
    "POSIX files": hasattr(os, "mkfifo"),  # links, FIFOs, closed pipes, control characters in names, …
    "/proc": Path("/proc/self").exists(),
    "C++ compiler": bool(shutil.which("cl" if os.name == "nt" else "c++")),
}
"""What some tests need, and whether this system has it: the arguments of the marker `needs`."""
SIGKILL, SIGSTOP, SIGHUP, SIGUSR1 = (getattr(signal, f"SIG{name}", None) for name in ("KILL", "STOP", "HUP", "USR1"))
"""Signals that tests send; None on Windows, where these tests are skipped."""

ForkServerProcess = getattr(multiprocessing.context, "ForkServerProcess", multiprocessing.Process)
if SYSTEM["fork"]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "tests.support.preload"])
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
"""Marks tests that fork. From Python 3.12 on, a fork warns if there are threads, and pytest-xdist always has one."""
TIMEOUT_S = 150
REPOSITORY = Path(__file__).parents[2]


def skip_without(*needs: str) -> None:
    """Skip the current test if this system lacks one of `SYSTEM`."""
    for name in needs:
        if not SYSTEM[name]:
            pytest.skip(f"this system has no {name}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_python(
    *arguments: object, folder: Path | None = None, timeout: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, in a process that has imported nothing and finds this repository."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
    program = [sys.executable, *map(str, arguments)]
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def start_program(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `train.py` in a folder with the given arguments, as a process."""
    return run_python(REPOSITORY / "train.py", *arguments, folder=folder, HYDRA_FULL_ERROR="0", **environment)


def becomes_true(condition: Callable[[], object], seconds: float = 10) -> bool:
    """Wait until a condition holds. On a busy machine, threads and processes take long to end."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def call_in_process(function: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """Call a function, such as a lambda, in another process, which does not outlive this one."""
    skip_without("fork")
    pickled = cloudpickle.dumps(function)
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(pickled,), daemon=True)
    process.start()
    return process


def _call(pickled: bytes) -> None:
    cloudpickle.loads(pickled)()


@contextmanager
def start_method(name: str) -> Iterator[None]:
    """Change the default start method of processes. On Linux, it is `forkserver` from Python 3.14 on."""
    if name != "spawn":
        skip_without("fork")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class TrainProcess(ForkServerProcess):
    """A running `train.py` in a process group of its own.

    Args:
        folder: Its working directory.
        arguments: Its command line.
        output: The file in `folder` that receives stdout and stderr.
        errors: The file that receives stderr instead.
        environment: Environment variables to set.
        before: Called in the process before the program; must be picklable.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        output: str = "output.log",
        errors: str | None = None,
        environment: dict[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        skip_without("fork")
        super().__init__()
        self.folder = folder
        self.arguments = arguments
        self.file = folder / output
        self.errors = folder / (errors or output)
        self.environment = {"HYDRA_FULL_ERROR": "0", **(environment or {})}
        self.before = before
        for file in {self.file, self.errors}:
            file.unlink(missing_ok=True)
        self.start()

    def run(self) -> None:
        os.setsid()
        os.chdir(self.folder)
        for file, descriptor in ((self.file, 1), (self.errors, 2)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ |= self.environment
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # It is ignored if the tests run under nohup.
        multiprocessing.set_start_method("fork", force=True)  # Loader workers are forked.
        sys.argv = ["train.py", *self.arguments]
        if self.before:
            self.before()
        from vitmnist.cli.train import main

        main()

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def until(self, pattern: str) -> TrainProcess:
        """Wait until the output matches a regular expression."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.output):
            assert self.is_alive(), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        return self

    def ended(self, *signals: int) -> tuple[int, str]:
        """Send the signals, wait for the end, and return the exit code (-N after signal N) and the output."""
        for number in signals:
            os.kill(self.pid, number)
        self.join(TIMEOUT_S)
        assert self.exitcode is not None, self.output
        return self.exitcode, self.output

    def kill_group(self) -> None:
        """Kill the process and its loader workers."""
        with suppress(ProcessLookupError):  # It may not be a group leader yet.
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        self.join()


@dataclass
class TrainRanks:
    """The processes of one distributed run, by rank."""

    folder: Path
    processes: list[TrainProcess]

    def until(self, pattern: str) -> TrainRanks:
        """Wait until the output of rank 0 matches a regular expression."""
        self.processes[0].until(pattern)
        return self

    def ended(self) -> tuple[list[int], list[str]]:
        """Wait for the end of all ranks, and return their exit codes and outputs."""
        ended = [process.ended() for process in self.processes]
        return [code for code, _ in ended], [output for _, output in ended]

    def succeeded(self) -> Path:
        """Return the folder after all ranks have ended with exit code 0."""
        codes, outputs = self.ended()
        assert not any(codes), "\n".join(outputs)
        return self.folder


def start_ranks(
    folder: Path, size: int, *arguments: str, each: dict[int, str] | None = None, **environment: str
) -> TrainRanks:
    """Start the processes of a run as `torchrun` does. Rank N prints to `output-N.log`.

    Args:
        folder: Their working directory.
        size: How many to start.
        arguments: The command line of all ranks.
        each: One more argument for some ranks.
        environment: Environment variables to set or to replace.
    """
    settings = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": str(free_port()), **environment}
    processes = []
    for rank in range(size):
        typed = [*arguments, each[rank]] if each and rank in each else arguments
        ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank), **settings}
        processes.append(TrainProcess(folder, *typed, output=f"output-{rank}.log", environment=ranked))
    return TrainRanks(folder, processes)


def kill_and_resume(folder: Path, arguments: list[str], kills: int, seed: str) -> str:
    """Train in `folder`/killed with the same command again and again, sending SIGKILL at random moments.

    One kill in five comes during the start, the others within a few steps of a save; there is a save at each step.

    Returns:
        The output of all processes.
    """
    draw, run, output = random.Random(seed), folder / "killed", ""
    arguments = [*arguments, "resume=auto", "hydra.run.dir=killed", "checkpoint.every_minutes=1e-9"]
    for _ in range(kills):
        process = TrainProcess(folder, *arguments)
        if draw.random() < 0.2:
            time.sleep(0.5 * draw.random())
        else:
            before = _last_save(run)
            while _last_save(run) == before and process.is_alive():
                time.sleep(0.0005)
            time.sleep(0.05 * draw.random())
        assert process.is_alive(), f"ended before it was killed {kills} times\n{process.output}"
        process.kill_group()
        output += process.output
    code, rest = TrainProcess(folder, *arguments, "checkpoint.every_minutes=null").ended()
    assert code == 0, output + rest
    return output + rest


def _last_save(run: Path) -> int:
    try:
        return (run / "checkpoints" / "last.pt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def block_training() -> None:
    """Replace the backward pass by a function that never returns."""
    import torch

    def block(*arguments: object, **options: object) -> None:
        print("blocked", flush=True)
        while True:
            time.sleep(0.01)

    torch.Tensor.backward = block


class SignalAfterEpoch(logging.Handler):
    """Sends a signal to this process after the first epoch."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("epoch 1/"):
            signal.raise_signal(self.signum)


def hide_optuna() -> None:
    """Let an import of optuna fail."""
    assert "optuna" not in sys.modules
    sys.modules["optuna"] = None  # type: ignore[assignment]


def kill_leftovers() -> None:
    """Kill every process started here that is still running."""
    for process in multiprocessing.active_children():
        if isinstance(process, TrainProcess):
            process.kill_group()
