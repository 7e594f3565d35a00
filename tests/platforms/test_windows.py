"""The commands run without what Windows lacks. Everything but the system is simulated: see conftest.py."""

import signal
from pathlib import Path

from tests.conftest import Printed, assert_same_run, result_of
from tests.platforms.conftest import TRAIN, StartOnWindows
from tests.support.processes import becomes_true
from vitmnist.errors import ExitCode

CTRL_BREAK = signal.SIGTTIN
"""The signal of Linux that has the number of Ctrl-Break on Windows."""

IMPORTS = """
import importlib, pkgutil, vitmnist, hydra_plugins.vitmnist_sweepers
for module in pkgutil.walk_packages(vitmnist.__path__, "vitmnist."):
    if module.name != "vitmnist.__main__":
        importlib.import_module(module.name)
"""


def test_every_module_can_be_imported(windows: StartOnWindows) -> None:
    windows("-c", IMPORTS).succeeded()


def test_a_run_is_stopped_saved_and_resumed(
    windows: StartOnWindows, quick: list[str], succeed: Printed, tmp_path: Path
) -> None:
    """By Ctrl-C; the weights are then those of Linux. The name of the run has a character that the code page lacks."""
    process = windows(TRAIN, *quick, "epochs=100000", "hydra.run.dir='≈'").until("epoch 3/")
    code, output = process.ended(signal.SIGINT)
    assert code == ExitCode.UNFINISHED, output
    assert "SIGINT was received; results: ?, resume with" in output
    epochs = f"epochs={len(result_of(tmp_path / '≈')['epochs']) + 1}"
    assert "Results: ?" in windows(TRAIN, "resume=≈", epochs).succeeded()
    assert "Results: ≈" in (tmp_path / "≈" / "vitmnist.log").read_text(encoding="utf-8")
    succeed(*quick, epochs, "hydra.run.dir=linux")
    assert_same_run(tmp_path / "linux", tmp_path / "≈")


LOCKED = """
from pathlib import Path
from threading import Thread
from vitmnist.runtime.file_lock import wait_for_lock
from vitmnist.runtime.run_folder import InUseError, folder_lock, is_in_use

def write(text):
    with wait_for_lock(Path("shared")):
        for _ in range(10):
            print(text, end="", flush=True)

with folder_lock(Path("run")):
    print(is_in_use(Path("run")))
    try:
        folder_lock(Path("run")).__enter__()
    except InUseError as error:
        print(error)
    print("locked", flush=True)
    input()
with folder_lock(Path("run")):
    pass
threads = [Thread(target=write, args=letter) for letter in "ab"]
for thread in threads:
    thread.start()
"""
LOOK = """
from pathlib import Path
from vitmnist.runtime.run_folder import is_in_use
print(is_in_use(Path("run")), Path("run/.lock").exists())
"""


def test_a_lock_is_seen_by_processes_and_threads(windows: StartOnWindows) -> None:
    process = windows("-c", LOCKED).until("locked")
    assert windows("-c", LOOK).succeeded() == "True True\n"
    output = process.press_enter().succeeded()
    assert output.startswith("False\nrun: in use by this process\n")
    assert output.splitlines()[3] in ("a" * 10 + "b" * 10, "b" * 10 + "a" * 10)
    assert windows("-c", LOOK).succeeded() == "False True\n"


ORPHAN = """
import os, subprocess, sys, time
from vitmnist.runtime.signals import StopSignal
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
    time.sleep(1)  # The child has started, and this process ends.
else:
    stop = StopSignal()
    stop.follow(os.getppid())
    print(stop.is_orphan, stop.code)
    while not stop.is_orphan:
        time.sleep(0.01)
    print(stop.code, flush=True)
"""


def test_a_process_sees_the_end_of_its_parent(windows: StartOnWindows, tmp_path: Path) -> None:
    """It keeps the ID of its parent, and there is no SIGHUP."""
    (tmp_path / "parent.py").write_text(ORPHAN)
    process = windows("parent.py")
    process.succeeded()
    assert becomes_true(lambda: process.output == f"False 0\n{signal.SIGTERM + 1}\n"), process.output


DECODED = """
import torch
from torch.utils.data import DataLoader, Dataset
from vitmnist import from_dataloader
from vitmnist.store.tree import find_difference

class Pictures(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3, 4, 4), index), index

if __name__ == "__main__":
    original = DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    expected = list(original)
    replacement = from_dataloader(original, "cache", folder="decoded", fingerprint="pictures")
    torch.manual_seed(0)
    print(find_difference(list(replacement), expected))
"""


def test_from_dataloader_reads_with_two_workers(windows: StartOnWindows, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DECODED)
    assert windows("script.py").succeeded() == "None\n"
