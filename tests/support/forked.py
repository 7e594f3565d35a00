"""A run that is killed twenty times and resumed each time, by processes that have imported torch already.

    python forked.py SEED ARGUMENTS…

A fork takes no time, so that most of the kills meet a run at work. The run's folder is `killed`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import vitmnist.run  # noqa: F401  # with torch
from vitmnist.cli.main import main

KILLS = 20
FOLDER = Path("killed")


def start(arguments: list[str]) -> int:
    """The program in a process group of its own, as a fork of this process."""
    child = os.fork()
    if child == 0:
        code: object = 1
        try:
            os.setsid()
            with open("output.log", "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            sys.argv = ["train.py", *arguments]
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
            print(code, file=sys.stderr)
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
    return child


def last_save() -> int:
    try:
        return (FOLDER / "checkpoints" / "last.pt").stat().st_mtime_ns
    except OSError:
        return 0


def ended(child: int) -> bool:
    """Whether the process is over, without taking note of it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_at_random(child: int, draw: random.Random) -> None:
    """Once in five while it starts, else within a few steps of its first save, of which there is one a step."""
    if draw.random() < 0.2:
        time.sleep(0.5 * draw.random())
    else:
        before = last_save()
        while last_save() == before and not ended(child):
            time.sleep(0.0005)
        time.sleep(0.05 * draw.random())
    if ended(child):
        sys.exit("the run ended before it was killed often enough")
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main_loop(seed: str, first: list[str]) -> None:
    draw = random.Random(seed)
    arguments = [*first, f"hydra.run.dir={FOLDER}", "checkpoint.every_minutes=1e-9"]
    for _ in range(KILLS):
        kill_at_random(start(arguments), draw)
        if any((FOLDER / "checkpoints").glob("*.pt")):  # also one that was whole but had not got its name yet
            arguments = [f"resume={FOLDER}"]
    # Without a save at each step, so that the rest is soon done.
    _, status = os.waitpid(start([*arguments, "checkpoint.every_minutes=null"]), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main_loop(sys.argv[1], sys.argv[2:])
