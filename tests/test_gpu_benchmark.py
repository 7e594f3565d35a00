"""`benchmarks/gpu.py` without a GPU: its commands are accepted; one that fails or hangs does not stop the others."""

import importlib
import runpy
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate

CODE = {
    "stopped after 5 s": "import time\ntry: print('begun', flush=True) or time.sleep(99)\nfinally: print('one failed')",
    "failed, exit code 1": "import sys; print('half a page'); sys.exit('out of memory')",
    "completed": r"print('# A page\n\n## Part')",
}
"""Python code by how its command ends."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    module = importlib.import_module("gpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    return module


def test_without_a_gpu_one_line_says_so_and_a_dry_run_prints_the_commands(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "none")
    assert gpu.main() == "No CUDA device: torch sees none. --dry-run prints the commands."
    sys.argv.append("--dry-run")
    assert gpu.main() is None
    assert capsys.readouterr().out.splitlines() == gpu.COMMANDS


def test_a_command_that_fails_or_hangs_is_reported_and_the_others_run(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {"ROOT": tmp_path, "DEVICE": gpu.choose_device("auto").type, "COMMAND_S": 5.0}
    values["COMMANDS"] = [f"python -c {shlex.quote(code)}" for code in CODE.values()]
    for name, value in values.items():
        monkeypatch.setattr(gpu, name, value)
    # A background job of a shell, and its children, ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gpu.main()
    signal.signal(signal.SIGINT, before)
    page = (tmp_path / "outputs" / "gpu.md").read_text()
    for text in (
        *CODE,
        "    begun\n    one failed",
        "    half a page\n    out of memory",
        "### A page\n\n#### Part\n",
    ):
        assert text in page
    monkeypatch.setattr(gpu, "TOTAL_S", 0.0)
    gpu.main()
    assert (tmp_path / "outputs" / "gpu.md").read_text().count("left out") == len(CODE)


def test_the_programs_accept_their_options(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in gpu.COMMANDS:
        _, program, *options = shlex.split(command)
        if program == "train.py":
            overrides = [option.partition(",")[0] for option in options if option != "-m"]  # The first job of a sweep.
            validate(Config, compose(overrides))
        elif program != "-m":
            monkeypatch.setattr(sys, "argv", [program, *options, "--output=missing/page.md"])
            with pytest.raises(SystemExit):
                runpy.run_path(str(REPOSITORY / program), run_name="__main__")
            assert "there is no folder missing" in capsys.readouterr().err  # the first check after the options
    assert (REPOSITORY / "tests" / "gpu").is_dir()
