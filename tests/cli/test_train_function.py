"""`vitmnist.train`: a run from Python is the run of the command line, and leaves the process as it was."""

import asyncio
import gc
import logging
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase

import vitmnist
from tests.conftest import PLAIN, Printed, Start, assert_same_run, assert_same_weights, result_of, write_mnist_like
from tests.support.pages import README, blocks
from tests.support.processes import REPOSITORY, SignalAfterEpoch
from vitmnist.cli.train_function import RUN_LOCK
from vitmnist.errors import ConfigError, DataError, RunInterrupted, TrainingError
from vitmnist.runtime.signals import handle_signals
from vitmnist.tracking.result import Result

STATES: dict[str, Callable[[], object]] = {
    "random state of torch": lambda: torch.get_rng_state().tolist(),
    "random state of NumPy": lambda: str(np.random.get_state()),
    "random state of Python": random.getstate,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "filled memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "cuDNN": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "precision": torch.get_float32_matmul_precision,
    "threads of torch": torch.get_num_threads,
    "gradients": torch.is_grad_enabled,
    "log handlers": lambda: [*logging.root.handlers],
    "log levels": lambda: {name: logging.getLogger(name).level for name in ("root", "vitmnist", "hydra")},
    "log errors": lambda: logging.raiseExceptions,
    "signal handlers": lambda: [signal.getsignal(signum) for signum in signal.valid_signals()],
    "working directory": Path.cwd,
    "garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "composer of Hydra": lambda: (GlobalHydra.instance(), GlobalHydra.instance().hydra),
    "configuration of Hydra": lambda: HydraConfig.instance().cfg,
    "version of Hydra": lambda: VersionBase.instance().version_base,
    "arguments": lambda: [*sys.argv],
    "modules path": lambda: [*sys.path],
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_states() -> dict[str, object]:
    return {name: read() for name, read in STATES.items()}


def test_a_run_from_python_is_the_run_of_the_command_line(stateful: list[str], runs: Path, tmp_path: Path) -> None:
    import pandas

    whole, folder = runs / "whole", tmp_path / "python"
    result = vitmnist.train(*stateful, folder=folder)
    assert_same_run(whole, folder)
    typed, called = result_of(whole), result_of(folder)
    assert (typed["overrides"], typed["config"]) == (called["overrides"], called["config"])
    assert typed.keys() == called.keys()
    files = [{re.sub(r"\d+", "", path.name) for path in run.iterdir()} for run in (whole, folder)]
    assert files[0] == files[1]
    assert "Results: python" in (folder / "vitmnist.log").read_text()
    assert result == Result.from_json(folder / "result.json")
    assert result.folder == folder
    assert pandas.DataFrame(result.epochs)["eval_acc"].tolist() == [epoch["eval_acc"] for epoch in typed["epochs"]]
    assert repr(result).startswith("Result(completed, 2 epochs, eval_acc ")
    assert len(repr(result)) < 120
    assert vitmnist.train(resume=folder) == result


@pytest.mark.parametrize("max_minutes", [None, 0])
def test_a_run_leaves_the_process_as_it_was(
    max_minutes: float | None, stateful: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be a program that uses Hydra itself."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(GlobalHydra.instance(), "hydra", object())
    monkeypatch.setattr(VersionBase.instance(), "version_base", object())
    logger, program_log = logging.getLogger("vitmnist"), logging.FileHandler(tmp_path / "program.log", "w")
    logging.root.addHandler(program_log)
    logger.setLevel(logging.DEBUG)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = read_states()
        if max_minutes is None:
            vitmnist.train(*stateful, "hydra.verbose=true", folder="run", schedule="one_cycle")
        else:
            with pytest.raises(TimeoutError):
                vitmnist.train(*stateful, folder="run", max_minutes=max_minutes)
        assert read_states() == before
        logger.info("still open")
    finally:
        torch.use_deterministic_algorithms(False)
        logger.setLevel(logging.NOTSET)
        logging.root.removeHandler(program_log)
        program_log.close()
    assert (tmp_path / "program.log").read_text() == "still open\n"
    assert "still open" not in (tmp_path / "run" / "vitmnist.log").read_text()


def test_runs_of_one_process_are_equal_also_in_a_loop_of_asyncio_and_in_a_thread(
    stateful: list[str], runs: Path, tmp_path: Path
) -> None:
    async def train() -> None:
        vitmnist.train(*stateful, folder="loop")
        await asyncio.to_thread(vitmnist.train, *stateful, folder="thread")

    asyncio.run(train())
    for name in ("loop", "thread"):
        assert_same_weights(runs / "whole", tmp_path / name)


@pytest.mark.parametrize(
    ("overrides", "keys", "message"),
    [
        (["batch_size=3,6"], {}, "batch_size=3,6: is a sweep; .* in Python, call vitmnist.train for each value"),
        ([], {"data": {"loader": ["ram", "disk"]}}, r"data/loader=\['ram', 'disk'\]: must be the name of a member"),
        ([], {"experiment": None}, "experiment=None: must be the name of a member"),
        ([], {"epochs": [1, 2]}, r"epochs=\[1, 2\]: must be int"),
        ([{"epochs": 3}], {}, r"vitmnist.train: {'epochs': 3}: must be a string; unpack a dict"),
        ([], {"seed": range(3)}, r"seed=range\(0, 3\): must be a number, text"),
        (["-m", "epochs=1"], {}, "-m: is an option of the command line only"),
        (["hydra.mode=MULTIRUN"], {}, "hydra.mode=MULTIRUN: is a sweep"),
    ],
)
def test_what_is_not_one_run_is_refused(overrides: list[Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        vitmnist.train(*overrides, **keys)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ConfigError, ["lr=0.1"]),
        (ConfigError, ["resume=absent"]),
        (ConfigError, ["optimizer.lr=[1"]),
        (DataError, ["data/dataset=image_folder", "data.dataset.path=.", "data.root=."]),
        (TrainingError, ["optimizer=sgd", "optimizer.lr=1e30", "checkpoint.every_minutes=1e-9"]),
    ],
)
def test_an_error_has_the_message_of_the_command_line(
    error: type[Exception], arguments: list[str], quick: list[str], refuse: Printed
) -> None:
    arguments = [*quick, *arguments] if error is TrainingError else arguments
    with pytest.raises(error) as raised:
        vitmnist.train(*arguments)
    assert refuse(*arguments) == f"error: {raised.value}\n"


def train_until_ctrl_c() -> None:
    """Call `vitmnist.train` with the arguments of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job of a shell ignores the signal.
    try:
        vitmnist.train(*sys.argv[1:])
    except KeyboardInterrupt as interrupted:
        print("KeyboardInterrupt:", interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.exit()


def test_ctrl_c_saves_a_run_that_is_resumed_bit_for_bit(stateful: list[str], start: Start, tmp_path: Path) -> None:
    arguments = [*stateful, "epochs=12"]
    process = start(*arguments, "hydra.run.dir=cut", before=train_until_ctrl_c)
    code, output = process.until("epoch 2/").ended(signal.SIGINT)
    assert code == 0, output
    message = "KeyboardInterrupt: SIGINT was received; results: cut, resume with\n    vitmnist.train(resume='cut')"
    assert output.endswith(f"{message}\n")
    assert 2 <= len(result_of(tmp_path / "cut")["epochs"]) < 12
    assert vitmnist.train(resume="cut").resumed
    vitmnist.train(*arguments, folder="whole")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_two_runs_at_a_time_are_refused(quick: list[str]) -> None:
    with RUN_LOCK, pytest.raises(ConfigError, match="another thread of this process trains"):
        vitmnist.train(*quick)


NOTEBOOK_SETUP = f"""
import logging, signal
from functools import partial
import vitmnist
from IPython.core.completer import provisionalcompleter
from tests.support.pictures import draw
from tests.support.processes import SignalAfterEpoch
few = ["data/dataset=kmnist", "data.root=.", "model=cnn", "batch_size=50", "{PLAIN}"]
vitmnist.train = partial(vitmnist.train, *few)
draw(7).save("scan.png")
"""
NOTEBOOK_CHECKS = """
assert len(table) == 4 and result.config["model"] == {"name": "mlp", "width": 32}
with provisionalcompleter():
    assert {shown.text for shown in get_ipython().Completer.completions("vitmnist.", 9)} == {*vitmnist.__all__}
logging.getLogger("vitmnist").addHandler(SignalAfterEpoch(signal.SIGINT))
try:
    vitmnist.train(folder="cut", epochs=9)
except KeyboardInterrupt as interrupted:
    assert str(interrupted).endswith("vitmnist.train(resume='cut')")
else:
    raise AssertionError("the run was not interrupted")
assert len(vitmnist.load_model("cut").classes) == 10
"""


@pytest.mark.slow
def test_the_documented_examples_run_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist_like(tmp_path / "KMNIST" / "raw", 200, 20)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (readme,) = (block for block in blocks("python", README) if "vitmnist.train(" in block)
    cells = [NOTEBOOK_SETUP, readme, *blocks("python", REPOSITORY / "docs" / "python.md"), NOTEBOOK_CHECKS]
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    notebook = new_notebook(cells=[*map(new_code_cell, cells)])
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "Evaluation(" in printed[1]
    assert "[Prediction(" in printed[1]
    assert "\nResult(completed, 2 epochs, eval_acc " in f"\n{printed[2]}"


@pytest.mark.parametrize(
    ("signum", "epochs", "raised", "status"),
    [(signal.SIGTERM, 2, RunInterrupted, "interrupted"), (signal.SIGINT, 1, KeyboardInterrupt, "completed")],
)
def test_no_signal_is_lost(
    signum: int, epochs: int, raised: type[BaseException], status: str, quick: list[str], tmp_path: Path
) -> None:
    """The first stops the run after its epoch; the second arrives in the last one."""
    handler = SignalAfterEpoch(signum)
    logging.getLogger("vitmnist").addHandler(handler)
    try:
        message = r"was received; results: cut, resume with\n    vitmnist.train\(resume='cut'\)$"
        # A background job of a shell ignores SIGINT.
        with handle_signals(signal.default_int_handler, signal.SIGINT), pytest.raises(raised, match=message):
            vitmnist.train(*quick, folder="cut", epochs=epochs)
    finally:
        logging.getLogger("vitmnist").removeHandler(handler)
    assert result_of(tmp_path / "cut")["status"] == status
