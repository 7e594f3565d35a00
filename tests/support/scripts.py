"""Scripts under `vitmnist diagnose`, each in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

SLOW_DATA = """
import os, signal, sys, time
os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is imported
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, Dataset, IterableDataset

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


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=220, check=False)


def diagnose(folder: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """Observe a script; returns the ended process and the JSON."""
    (folder / "mine.py").write_text(script)
    ended = start(folder, "-m", "vitmnist", "diagnose", "--json=report.json", *options, "mine.py", *arguments)
    assert (folder / "report.json").exists(), ended.stderr
    return ended, json.loads((folder / "report.json").read_text() or "{}")
