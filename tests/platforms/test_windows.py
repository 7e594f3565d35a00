"""The commands run without what Windows lacks. Everything but the system is simulated: see conftest.py."""

import json
import re
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Printed, assert_same_run, learned, result_of
from tests.platforms.conftest import TRAIN, StartOnWindows
from vitmnist.errors import ExitCode

pytestmark = pytest.mark.needs("/proc")  # The simulation is for Linux.
CTRL_BREAK = signal.SIGUSR2
"""The signal of Linux that stands for Ctrl-Break."""


@pytest.mark.slow
def test_a_run_is_stopped_saved_and_resumed(
    windows: StartOnWindows, quick: list[str], succeed: Printed, tmp_path: Path
) -> None:
    """The weights are then those of Linux. The name of the run has a character that the code page lacks."""
    process = windows(TRAIN, *quick, "epochs=100000", "hydra.run.dir='≈'").until("epoch 3/")
    code, output = process.ended(CTRL_BREAK)
    assert code == ExitCode.UNFINISHED, output
    assert "SIGBREAK was received; results: ?, resume with" in output
    epochs = f"epochs={len(result_of(tmp_path / '≈')['epochs']) + 1}"
    assert "Results: ?" in windows(TRAIN, "resume=≈", epochs).succeeded()
    assert "Results: ≈" in (tmp_path / "≈" / "vitmnist.log").read_text(encoding="utf-8")
    assert result_of(tmp_path / "≈")["epochs"][0]["host_peak_mib"] == 1024
    succeed(*quick, epochs, "hydra.run.dir=linux")
    assert_same_run(tmp_path / "linux", tmp_path / "≈")


LOCKED = """
from pathlib import Path
from threading import Thread
from vitmnist.runtime.file_lock import is_locked, wait_for_lock
from vitmnist.runtime.run_folder import InUseError, lock_folder

def write(text):
    with wait_for_lock(Path("shared")):
        for _ in range(10):
            print(text, end="", flush=True)

with lock_folder(Path("run")):
    print(is_locked(Path("run/.lock").resolve()))
    try:
        lock_folder(Path("run")).__enter__()
    except InUseError as error:
        print(error)
    print("locked", flush=True)
    input()
with lock_folder(Path("run")):
    pass
threads = [Thread(target=write, args=letter) for letter in "ab"]
for thread in threads:
    thread.start()
"""
LOOK = """
from pathlib import Path
from vitmnist.runtime.file_lock import is_locked
print(is_locked(Path("run/.lock").resolve()), Path("run/.lock").exists())
"""


def test_a_lock_is_seen_by_processes_and_threads(windows: StartOnWindows) -> None:
    process = windows("-c", LOCKED).until("locked")
    assert windows("-c", LOOK).succeeded() == "True True\n"
    output = process.press_enter().succeeded()
    assert output.startswith("False\nrun: in use by another run; wait for it, or stop it\n")
    assert output.splitlines()[3] in ("a" * 10 + "b" * 10, "b" * 10 + "a" * 10)
    assert windows("-c", LOOK).succeeded() == "False True\n"


IMPORTS = """
import importlib, pkgutil, vitmnist, hydra_plugins.vitmnist_sweepers
for module in pkgutil.walk_packages(vitmnist.__path__, "vitmnist."):
    if module.name != "vitmnist.__main__":
        importlib.import_module(module.name)
"""
FILES = """
import threading
from pathlib import Path

import torch

from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic
from vitmnist.store.cache_file import open_or_write_cache

def decode(first):
    chunks = [(torch.arange(first, first + 5),)]
    return open_or_write_cache(Path("decoded"), "key", 5, lambda: chunks, names=["images"])[0][0]

mapped = decode(0)
(path,) = Path("decoded").glob("*/images.npy")
with path.open("r+b") as file:
    file.seek(-8, 2)
    file.write(b"damaged!")
try:
    decode(10)
except DataError as error:
    print(error)
del mapped
again = decode(20)
again.zero_()  # This changes copies of the pages.
print(decode(30).tolist())

write_atomic(Path("result.json"), b"first")
opened = Path("result.json").open("rb")
threading.Timer(0.2, opened.close).start()
write_atomic(Path("result.json"), b"second")
print(Path("result.json").read_bytes())
"""


def test_every_module_is_imported_and_files_are_replaced_although_others_have_them_open(
    windows: StartOnWindows, tmp_path: Path
) -> None:
    """A process maps a damaged cache, and `vitmnist status` reads a record for a moment."""
    *refused, decoded, record = windows("-c", IMPORTS + FILES).succeeded().splitlines()
    assert refused[-1].startswith("the cache folder decoded cannot be used: ")
    assert (decoded, record) == ("[20, 21, 22, 23, 24]", "b'second'")


COMMANDS = """
import sys
from vitmnist.__main__ import main

for command in sys.argv[1:]:
    sys.argv = ["vitmnist", *command.split()]
    main()
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_each_loader_trains_and_its_runs_are_used(windows: StartOnWindows, quick: list[str], tmp_path: Path) -> None:
    loaders = "-m data/loader=ram,cache,gpu_slice,prefetch hydra.sweep.dir=swept"
    auto = "data/loader=auto data.loader.candidates=[ram,prefetch] hydra.run.dir=swept/auto"
    disk = "data/loader=disk data.loader.num_workers=1 hydra.run.dir=swept/disk"  # Each worker imports torch.
    for index in range(2):
        Image.new("L", (28, 28), 100 * index).save(tmp_path / f"{index}.png")
    commands = {
        "report swept": "Times: ",
        "status swept": r"completed +2 +2",
        "evaluate swept/disk --mistakes mistakes.csv --grid grid.png": "acc .*%",
        "predict swept/disk 0.png 1.png": "0.png",
        "export swept/disk --format torch": "model.pt2.json",
    }
    trained = [" ".join([*quick, typed]) for typed in (loaders, auto, disk)]
    output = windows("-c", COMMANDS, *trained, *commands).succeeded()
    assert re.search("(?s)" + ".*".join(commands.values()), output), output
    folders = sorted(path.parent for path in tmp_path.glob("swept/*/result.json"))
    assert [bool(result_of(folder)["auto"]) for folder in folders] == [False] * 4 + [True, False]
    assert len({json.dumps(learned(folder)) for folder in folders}) == 1
    assert (tmp_path / "swept" / "report.html").exists()
