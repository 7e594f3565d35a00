"""The software of a run in its record."""

import subprocess
from pathlib import Path

import pytest
import torch

from vitmnist.tracking.environment import describe_environment, read_source_state


def test_a_package_under_another_name_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitmnist.tracking.environment.PACKAGES", ("torch", "no-such-package"))
    environment = describe_environment(torch.device("cpu"))
    assert torch.__version__.startswith(environment["torch"])
    assert environment["no-such-package"] is None


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
