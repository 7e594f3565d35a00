"""`benchmarks/gpu.py` without a GPU: its commands are accepted; one that fails or hangs does not stop the others."""

import importlib
import runpy
import shlex
import sys
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate

# A background job of a shell, and its children, ignore SIGINT.
INTERRUPTED = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try: print("begun", flush=True) or time.sleep(60)
finally: print("one failed")
"""


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


@pytest.mark.parametrize(
    ("code", "limit_s", "outcome", "printed"),
    [
        ("print('half a page'); exit('no memory')", 60, "failed, exit code 1", "half a page\n    no memory"),
        (INTERRUPTED, 2, "stopped after 2 s", "    begun\n    one failed"),
        (r"print('# A page\n\n## Part')", 60, "completed", "### A page\n\n#### Part\n"),
    ],
)
def test_how_a_command_ended_is_reported(gpu: ModuleType, code: str, limit_s: int, outcome: str, printed: str) -> None:
    reported, page = gpu.run(f"python -c {shlex.quote(code)}", limit_s)
    assert reported == outcome
    assert printed in page


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
            assert "the folder missing does not exist" in capsys.readouterr().err  # the first check after the options
    assert (REPOSITORY / "tests" / "gpu").is_dir()
