"""The benchmarks write their tables, and time the model of this project."""

import importlib
import logging
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from docs.scripts.loader_chart import LAYOUTS, draw, read_times
from tests.conftest import REPOSITORY, Printed
from tests.support.benchmarks import BENCHMARKS
from tests.support.pages import commands
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
