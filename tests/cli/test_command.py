"""How every command ends: one message and an exit code, also on an interrupt or a closed pipe."""

import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.conftest import CallHere
from tests.support.processes import run_python
from vitmnist.__main__ import COMMANDS, command_main, main
from vitmnist.cli.command import format_command
from vitmnist.cli.process import resume_hint
from vitmnist.errors import DataError


def test_usage_errors_and_interrupts_have_their_exit_codes(
    call_here: CallHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_here(main).stdout.startswith("usage: vitmnist COMMAND")
    ended = call_here(main, "evalute", "RUN")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: evalute: there is no such command; did you mean 'evaluate'? allowed: diag")
    assert "error: train-all: there is no such command" in call_here(main, "train-all").stderr

    def interrupt(folders: list[Path]) -> None:  # by no signal, which tests that run in the background ignore
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmnist.cli.status.find_runs", interrupt)
    ended = call_here(command_main("status"), ".")
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
    monkeypatch.setattr(DataError, "exit_code", 7)
    assert call_here(command_main("report"), "nowhere").returncode == 7


@pytest.mark.needs("POSIX files")
def test_the_name_of_a_file_cannot_command_the_terminal(call_here: CallHere) -> None:
    assert call_here(main, "report", "\x1b[2J").stderr.startswith(r"error: \x1b[2J: there is no such folder")


@pytest.mark.needs("POSIX files")
def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / ".hydra").mkdir(parents=True)
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = [sys.executable, "-m", "vitmnist", "status", "runs"]
    ended = subprocess.run(program, cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, "")


INTERRUPT = """
import signal, sys
from vitmnist.__main__ import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == AT:
            signal.raise_signal(signal.SIGINT)

AT = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
main()
"""


def test_ctrl_c_during_the_imports_is_one_line(tmp_path: Path) -> None:
    ended = run_python("-c", INTERRUPT, "torch", "evaluate", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_the_resume_hint_names_nodes_and_processes_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, ranks_per_node, command in (
        ("train.py", "2", "torchrun --nnodes=2 --nproc-per-node=2 train.py"),
        ("bin/vitmnist", "1", "torchrun --nnodes=4 --nproc-per-node=1 -m vitmnist"),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        monkeypatch.setattr(sys, "argv", [script])
        assert format_command(4) == command


HELP = """
import sys
from vitmnist.__main__ import main
sys.argv = ["vitmnist", "--help"]
main()
assert not {"torch", "hydra", "omegaconf", "numpy", "yaml"} & set(sys.modules), sys.modules
"""


def test_help_lists_the_commands_on_one_screen_and_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    printed = run_python("-c", HELP, folder=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert len(printed.stdout.splitlines()) <= 24
    assert re.findall(r"^  (\w+) +\w", printed.stdout, re.MULTILINE) == [*COMMANDS]


MISSING = {
    "train": ["resume=nowhere"],
    "evaluate": ["nowhere"],
    "predict": ["nowhere", "scan.png"],
    "export": ["nowhere", "--format=torch"],
    "report": ["nowhere"],
    "status": ["nowhere"],
    "diagnose": ["nowhere.py"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_explained_and_its_mistakes_have_their_exit_codes(name: str, call_here: CallHere) -> None:
    add_argument = ArgumentParser.add_argument
    ended = call_here(main, name, "--help")
    assert ArgumentParser.add_argument is add_argument, "other parsers of the process are not affected"
    expected = "== Configuration groups ==" if name == "train" else f"usage: vitmnist {name} "
    assert (ended.returncode, expected in ended.stdout) == (0, True)
    ended = call_here(main, name, *MISSING[name])
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(r"error: .*nowhere.*\n", ended.stderr)
    if name != "diagnose":
        assert call_here(main, name, "--nonsense").returncode == (1 if name == "train" else 2)


def test_an_interruption_names_results_only_if_there_are_any(tmp_path: Path) -> None:
    assert resume_hint(tmp_path, "vitmnist") == ""
    (tmp_path / "result.json").touch()
    assert resume_hint(tmp_path, "vitmnist").startswith("; results: ")
