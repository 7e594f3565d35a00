"""Runs scripts under `vitmnist diagnose`, each in a process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import TrainProcess, run_python

SLOW_DATA = """
import os, signal, sys, time
from torch.utils.data import DataLoader, Dataset, IterableDataset
from vitmnist.diagnosis import candidates
candidates.MAX_TIMING_S = 0.5

class Slow(Dataset):
    def __init__(self, seconds=0.005, samples=24):
        self.seconds, self.samples = seconds, samples
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        time.sleep(self.seconds)
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


def run_vitmnist() -> None:
    """Run `vitmnist` in a process that has imported torch."""
    from vitmnist.__main__ import main

    sys.argv[0] = "vitmnist"
    main()
    sys.exit()


def diagnose(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), fresh: bool = False, **environment: str
) -> tuple[Any, dict[str, Any]]:
    """Observe a script. Returns the ended process and the JSON.

    Args:
        fresh: in a process that has imported nothing.
    """
    (folder / "mine.py").write_text(script, encoding="utf-8")
    command = ["diagnose", "--json=report.json", *options, "mine.py", *arguments]
    if fresh:
        ended = run_python("-m", "vitmnist", *command, folder=folder)
    else:
        files = {"output": "stdout", "errors": "stderr"}
        process = TrainProcess(folder, *command, **files, environment=environment, before=run_vitmnist)
        code, output = process.ended()
        ended = subprocess.CompletedProcess(command, code, output, (folder / "stderr").read_text(encoding="utf-8"))
    assert (folder / "report.json").exists(), ended.stderr
    return ended, json.loads((folder / "report.json").read_text(encoding="utf-8") or "{}")
