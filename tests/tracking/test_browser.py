"""TensorBoard shows the runs of a sweep, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.conftest import start_program
from tests.support.browser import CHROMIUM, chromium, open_hparams, open_time_series, tensorboard

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
LOADERS, SIZES = ("ram", "disk"), (6, 12)


@pytest.fixture(scope="module")
def sweep(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of two loaders by three batch sizes; the set is smaller than the largest."""
    folder = tmp_path_factory.mktemp("browser")
    quick = ["data/dataset=kmnist", f"data.root={tiny_root}", "epochs=2", "model=cnn", "optimizer.lr=0.01"]
    varied = [f"data/loader={','.join(LOADERS)}", f"batch_size={','.join(map(str, SIZES))},24", "data.drop_last=true"]
    assert start_program(folder, "-m", *quick, *varied, "hydra.sweep.dir=sweep").returncode == 1
    return folder / "sweep"


@pytest.fixture(scope="module")
def address(sweep: Path):
    with tensorboard(sweep) as address:
        yield address


@pytest.fixture(scope="module")
def page():
    with chromium() as page:
        yield page


def test_time_series_show_all_runs(address: str, page: Page) -> None:
    open_time_series(page, address, "time/epoch_s")
    for loader in LOADERS:
        for size in SIZES:
            expect(page.get_by_text(re.compile(rf"{loader}-bs{size}")).first).to_be_visible()


def test_hparams_has_a_row_for_each_run(address: str, page: Page) -> None:
    open_hparams(page, address)
    for title in ("data/loader", "batch_size", "summary/eval_acc_last"):
        expect(page.get_by_text(title, exact=True).first).to_be_visible()
    rows = page.locator("vaadin-grid-cell-content, tr, [role=row]").filter(has_text=re.compile(r"^\s*\d-.*bs\d+"))
    expect(rows).to_have_count(len(LOADERS) * len(SIZES))  # none for the refused ones
