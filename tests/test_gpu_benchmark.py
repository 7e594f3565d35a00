"""`benchmarks/gpu.py` without a GPU: its commands are accepted; one that fails or hangs does not stop the others."""

import importlib
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate

HANGS = """
import signal, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job of a shell ignores the signal.
try:
    print("begun", flush=True)
    time.sleep(1000)
finally:
    print("one test failed")
"""
TINY = {
    "hangs": HANGS,
    "fails": "import sys; print('half a page'); sys.exit('out of memory')",
    "works": r"print('# A page\n\n## Part')",
}


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
    with pytest.raises(SystemExit) as ended:  # a text ends the program with 1
        sys.exit(gpu.main())
    assert str(ended.value).startswith("No CUDA device")
    assert "\n" not in str(ended.value)
    sys.argv.append("--dry-run")
    assert gpu.main() is None
    assert capsys.readouterr().out.splitlines() == gpu.COMMANDS


def test_a_command_that_fails_or_hangs_is_reported_and_the_others_run(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "DEVICE", gpu.choose_device("auto").type)
    monkeypatch.setattr(gpu, "COMMAND_S", 5.0)
    monkeypatch.setattr(gpu, "COMMANDS", [f"python -c {shlex.quote(code)}" for code in TINY.values()])
    gpu.main()
    page = (tmp_path / "outputs" / "gpu.md").read_text()
    for text in (
        "stopped after 5 s",
        "    begun\n    one test failed",
        "failed, exit code 1",
        "    half a page\n    out of memory",
    ):
        assert text in page
    assert "\n\n### A page\n\n#### Part\n" in page
    assert "attach" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "TOTAL_S", 0.0)
    gpu.main()
    assert (tmp_path / "outputs" / "gpu.md").read_text().count("left out") == len(TINY)


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
