"""What a record says about machine, software and source code."""

import json
import subprocess
from pathlib import Path

import torch

from tests.conftest import REPOSITORY
from vitmnist.tracking.environment import describe_environment, read_source_state

CPU = torch.device("cpu")


def test_the_environment_has_what_decides_speed() -> None:
    environment = json.loads(json.dumps(describe_environment(CPU)))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert environment["git_commit"] == (head.stdout.strip() or None)
    assert environment["gpu"] is None
    assert environment["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert environment["torch_threads"] == torch.get_num_threads()


def test_the_commit_of_the_source_tree_and_its_changes_are_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    assert set(read_source_state(tmp_path).values()) == {None}
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    state = read_source_state(tmp_path)
    assert (len(state["git_commit"]), state["git_dirty"]) == (40, False)
    (tmp_path / "new.py").touch()
    assert read_source_state(tmp_path) == state | {"git_dirty": True}
    assert set(read_source_state(tmp_path / ".git").values()) == {None}
