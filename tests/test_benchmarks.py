"""The benchmarks write their tables, and time the model of this project."""

import importlib
import logging
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.conftest import Printed
from tests.support.benchmarks import BENCHMARKS
from tests.support.pages import commands
from tests.support.processes import REPOSITORY
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.models.vit import ViT, ViTOptions


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", BENCHMARKS)
def test_benchmarks_write_their_table(
    script: str, output_of: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = next(iter(commands(f"python benchmarks/{script}.py")), [])
    small, rows = BENCHMARKS[script]
    program = REPOSITORY / "benchmarks" / f"{script}.py"
    monkeypatch.syspath_prepend(str(program.parent))
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # A script may call `logging.disable`.
    run = partial(runpy.run_path, str(program), run_name="__main__")
    printed = output_of(run, *documented, "--output=table", *small)
    (table,) = (file.read_text() for file in (tmp_path / "table", tmp_path / "table.md") if file.exists())
    assert table == printed
    assert set(rows) <= set(re.findall(r"^\| +(\S.*?) +\| +\d", table, re.MULTILINE))


def test_the_model_of_the_benchmarks_is_equal_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    article = importlib.import_module("article")
    ours, theirs = (kind(ViTOptions(), (1, 28, 28), 10).double() for kind in (ViT, article.ArticleViT))
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


def test_the_commands_of_the_gpu_page_have_valid_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    for command in importlib.import_module("gpu").COMMANDS:
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
