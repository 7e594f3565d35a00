"""The files of a report are complete and agree with each other; the page is readable at any width."""

import csv
import re
from base64 import b64encode
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from docs.scripts.screenshots import CHROMIUM, chromium
from tests.support.processes import run_python
from tests.support.records import run, timed_run, write
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.report.write import write_report


def test_all_files_agree(tmp_path: Path) -> None:
    cells = [(loader, size) for loader in ("disk", "ram") for size in (100, 200, 400)]
    for index, (loader, size) in enumerate(cells):
        run(tmp_path / "sweep" / f"{index}", loader, size, (9.0, 2.0 + index))
    write_report([tmp_path / "sweep"], tmp_path / "report")
    files = {file.name: file for file in (tmp_path / "report").iterdir()}
    assert {"report.md", "report.csv", "report.png", "report.html"} <= files.keys()
    with files["report.csv"].open() as file:
        table = list(csv.DictReader(file))
    measured = [(row["data/loader"], row["batch_size"], float(row["epoch_s"])) for row in table]
    names = [metric.name for metric in build_epoch_table().values()]
    assert {f"{name}{end}" for name in names for end in ("", "_low", "_high")} <= table[0].keys()
    assert measured == [(loader, str(size), 2.0 + index) for index, (loader, size) in enumerate(cells)]
    text, page = files["report.md"].read_text(), files["report.html"].read_text()
    assert len(re.findall(r"^\| +(?:100|200|400) +\| (?:disk|ram) ", text, re.MULTILINE)) == 6
    for shown in ("Some CPU", "2.15.0", "mnist, images: 60 train, 10,000 test", "2.00"):
        assert shown in text
        assert shown in page
    assert page.count("<table>") == 2
    assert Image.open(files["report.png"]).format == "PNG"
    assert b64encode(files["report.png"].read_bytes()).decode() in page[: page.index("<table>")]


def test_a_report_without_times_has_no_chart(tmp_path: Path) -> None:
    run(tmp_path / "0", epochs=[])
    write_report([tmp_path], tmp_path)
    assert not (tmp_path / "report.png").exists()
    assert "report.png" not in (tmp_path / "report.html").read_text() + (tmp_path / "report.md").read_text()


def test_the_command_reports_across_sweeps_without_torch(tmp_path: Path) -> None:
    run(tmp_path / "one" / "0", "ram")
    run(tmp_path / "two" / "0", "disk")
    ended = run_python("-X", "importtime", "-m", "vitmnist", "report", "one", "two", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Lowest time: ram, 3.00 s per epoch (single run)" in ended.stdout
    (page,) = (tmp_path / "outputs" / "reports").rglob("report.html")
    assert ended.stdout.splitlines()[-1] == f"Report: {page.relative_to(tmp_path)}"
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


HOSTILE = '<script>window.hacked = 1</script><img src="http://x/y" onerror="window.hacked = 1"> </svg> & "q"'
LONG = "name" * 60
ODD = timed_run(
    "ram", 1.0, environment={"gpu": HOSTILE, "cpu": LONG}, config={"model.name": LONG, "data.root": HOSTILE}
)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_nothing_overflows_the_page_and_nothing_is_requested(tmp_path: Path) -> None:
    failed = timed_run("disk", 1.0, status="failed", error=f"{HOSTILE} {LONG}")
    write_report([write(tmp_path, [ODD, {**ODD, "loader": HOSTILE}, failed])], tmp_path)
    requested: list[str] = []
    with chromium() as page:
        page.on("request", lambda request: requested.append(request.url))
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.goto((tmp_path / "report.html").as_uri())
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) == 0, width
            expect(page.get_by_role("img", name="Seconds per epoch")).to_be_visible()
            # A table fits its box, whatever it contains.
            for box in page.locator(".scroll").all():
                assert box.bounding_box()["width"] <= width
        assert set(requested) == {(tmp_path / "report.html").as_uri()}
        assert page.evaluate("window.hacked") is None
