"""`windows`: runs Python without what Windows lacks; tests/platforms/windows/sitecustomize.py says what that is."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.support.processes import REPOSITORY

TIMEOUT_S = 400  # Each worker imports torch.
TRAIN = str(REPOSITORY / "train.py")


@dataclass
class WindowsProcess:
    """A running Python program whose stdout and stderr go to one file, in the code page."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text(encoding="cp1252")

    def until(self, pattern: str) -> "WindowsProcess":
        """Wait until the output matches a regular expression."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.output):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        return self

    def press_enter(self) -> "WindowsProcess":
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self

    def ended(self, *signals: int) -> tuple[int, str]:
        """Send the signals, and return the exit code and the output."""
        for signum in signals:
            self.process.send_signal(signum)
        return self.process.wait(TIMEOUT_S), self.output

    def succeeded(self) -> str:
        """Return the output; the exit code must be 0."""
        code, output = self.ended()
        assert code == 0, output
        assert "Traceback" not in output
        return output


StartOnWindows = Callable[..., WindowsProcess]


@pytest.fixture
def windows(tmp_path: Path) -> Iterator[StartOnWindows]:
    """Start Python in an empty folder with the given arguments, and do not wait for it."""
    paths = [str(Path(__file__).parent / "windows"), str(REPOSITORY)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"}
    with ExitStack() as stack:
        count = 0

        def start(*arguments: str, folder: Path = tmp_path) -> WindowsProcess:
            nonlocal count
            count += 1
            file = folder / f"output-{count}.log"
            output: IO[bytes] = stack.enter_context(file.open("wb"))
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # A test can send a signal to the process and its workers.
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return WindowsProcess(process, file)

        yield start
