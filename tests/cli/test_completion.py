"""Tab completion in bash, typed into a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

KILL_LINE = "\x15"  # Ctrl-U


@contextmanager
def bash(folder: Path) -> Iterator[int]:
    """A terminal with an interactive bash, whose `python` and `vitmnist` are those of the tests."""
    terminal, shell_end = pty.openpty()
    script = folder / "vitmnist"  # as pip writes it
    script.write_text(f"#!{sys.executable}\nfrom vitmnist.__main__ import main\nmain()\n")
    script.chmod(0o755)
    path = f"{script.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=shell_end,
        stdout=shell_end,
        stderr=shell_end,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb", "HISTFILE": ""},
        start_new_session=True,
    )
    os.close(shell_end)
    try:
        yield terminal
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def press(keys: str, terminal: int, until: str) -> None:
    """Type into the terminal, and read until a text appears; a test that waits in vain ends by its timeout."""
    os.write(terminal, keys.encode())
    shown = ""
    while until not in shown:
        shown += os.read(terminal, 1024).decode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("program", ["python train.py", "vitmnist"])
def test_tab_completes_members_and_keys(program: str, tmp_path: Path) -> None:
    with bash(tmp_path) as terminal:
        press(f"cd {REPOSITORY if program == 'python train.py' else '.'}\n", terminal, "cd ")
        press(f'eval "$({program} -sc install=bash)"; echo $((6 * 7)) is the answer\n', terminal, "42 is the answer")
        press(f"{program} data/loader=gpu_\t", terminal, "data/loader=gpu_slice")
        press(f"{KILL_LINE}{program} model=cnn model.w\t", terminal, "model.width=")  # not a key of the default member
