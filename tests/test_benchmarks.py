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

from docs.scripts.loader_chart import LAYOUTS, draw, read_times
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


def test_the_chart_has_the_recorded_times_and_ratios_that_follow_from_them() -> None:
    times = read_times(REPOSITORY / "benchmarks" / "results" / "sweep-cpu" / "report.csv")
    assert [*times] == ["100", "500"]
    assert [*times["100"]] == [*times["500"]], "rows can be compared across batch sizes"
    wide, narrow = (
        [text.get_text() for axes in draw(times, "light", layout).axes for text in axes.texts]
        for layout in LAYOUTS.values()
    )
    assert set(wide) == set(narrow)
    figures = [text.removesuffix("×").split(" s · ") for text in wide if text.endswith("×")]
    seconds, ratios = ([float(pair[column]) for pair in figures] for column in (0, 1))
    assert seconds == [round(time.seconds, 2) for loaders in times.values() for time in loaders.values()]
    (caption,) = (line for line in (REPOSITORY / "README.md").read_text().splitlines() if "<picture>" in line)
    for first in (0, 4):
        panel = seconds[first : first + 4]
        assert ratios[first : first + 4] == pytest.approx([time / min(panel) for time in panel], abs=0.005)
        assert str(max(ratios[first : first + 4])) in caption


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


# A background job of a shell, and its children, ignore SIGINT.
INTERRUPTED = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try: print("begun", flush=True) or time.sleep(60)
finally: print("one failed")
"""


@pytest.mark.parametrize(
    ("code", "limit_s", "outcome", "printed"),
    [
        ("print('half a page'); exit('no memory')", 60, "failed, exit code 1", "half a page\n    no memory"),
        (INTERRUPTED, 2, "stopped after 2 s", "    begun\n    one failed"),
        (r"print('# A page\n\n## Part')", 60, "completed", "### A page\n\n#### Part\n"),
    ],
)
def test_how_a_command_ended_is_reported(
    code: str, limit_s: int, outcome: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    reported, page = importlib.import_module("gpu").run(f"python -c {shlex.quote(code)}", limit_s)
    assert reported == outcome
    assert printed in page
