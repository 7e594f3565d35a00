"""The files of a report are complete and agree with each other; the page is readable at any width."""

import csv
import re
from base64 import b64encode
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from PIL import Image

from docs.scripts.screenshots import CHROMIUM, chromium
from tests.support.processes import run_python
from tests.support.records import the_only, timed_run, write, write_run
from vitmnist.report.plots import draw_panels
from vitmnist.report.write import write_report
from vitmnist.tracking.runs import build_run_table


def test_all_files_agree(tmp_path: Path) -> None:
    cells = [(loader, size) for loader in ("disk", "ram") for size in (100, 200, 400)]
    for index, (loader, size) in enumerate(cells):
        write_run(tmp_path / "sweep" / f"{index}", loader, size, (9.0, 2.0 + index))
    write_report([tmp_path / "sweep"], tmp_path / "report")
    files = {file.name: file for file in (tmp_path / "report").iterdir()}
    assert files.keys() == {"report.md", "report.csv", "report.png", "report.html"}
    with files["report.csv"].open() as file:
        table = list(csv.DictReader(file))
    measured = [(row["data/loader"], row["batch_size"], float(row["epoch_s"])) for row in table]
    names = build_run_table()
    assert {f"{name}{end}" for name in names for end in ("", "_low", "_high")} <= table[0].keys()
    assert measured == [(loader, str(size), 2.0 + index) for index, (loader, size) in enumerate(cells)]
    text, page = files["report.md"].read_text(), files["report.html"].read_text()
    assert len(re.findall(r"^\| +(?:100|200|400) +\| (?:disk|ram) ", text, re.MULTILINE)) == 12, "two tables"
    assert all(shown in text and shown in page for shown in ("Some CPU", "2.15.0", "mnist, images: 60 train", "2.00"))
    panels = draw_panels(the_only(tmp_path / "sweep"))
    sources = {title: f"data:image/png;base64,{b64encode(png).decode()}" for title, png in panels.items()}
    images = [f'alt="{title}" src="{source}"' for title, source in sources.items()]
    assert all(image in page for image in images)
    with Image.open(files["report.png"]) as joined:
        assert joined.width == len(panels) * 560


def test_a_report_says_first_what_it_is_about_and_what_is_best_and_folds_the_versions(tmp_path: Path) -> None:
    ended = datetime(2026, 3, 4, 5, 6).timestamp()
    for index in range(2):
        folder = tmp_path / f"{index}-a b"
        times = {"began_at": ended - 9.0 + 5 * index, "ended_at": ended - 5.0 * (1 - index)}
        write_run(folder, config={"model.depth": index}, **times)
    command = {"task": ["model=vit", "model.depth=0,1"], "hydra": []}
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": command}}))
    text = write_report([tmp_path], tmp_path)
    assert "Test accuracy: 90.00% in each configuration. Best run: 0-a b\n" in text
    page = (tmp_path / "report.html").read_text()
    parts = [
        *(f"<title>Report on {tmp_path.as_posix()}</title>", f"<h1>Report on {tmp_path.as_posix()}</h1>"),
        *("<code>python train.py -m model=vit model.depth=0,1</code>", "2026-03-04 05:06, Some CPU, here, mnist"),
        'Best run: <a href="0-a%20b">0-a b</a>',
        *('alt="Seconds per epoch"', "<table>", '<a href="1-a%20b">1-a b</a></td>'),
        *("<details>\n<summary>Machine, software and data</summary>", "2.15.0", "<summary>How to read this report"),
    ]
    places = [page.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert "Best run: ../0-a b\n" in write_report([tmp_path / "0-a b"], tmp_path / "0-a b")


def test_a_failed_run_is_never_the_best(tmp_path: Path) -> None:
    """Neither run is timed, because they overlapped; the failed one had faster epochs."""
    for loader, seconds, status in (("ram", 0.5, "failed"), ("disk", 1.0, "completed")):
        write_run(tmp_path / loader, loader, times=(seconds, seconds), status=status, began_at=1000.0, ended_at=1020.0)
    assert "Best run: disk\n" in write_report([tmp_path], tmp_path)


def test_a_report_without_times_has_no_panels_and_names_no_best_run(tmp_path: Path) -> None:
    write_run(tmp_path / "0", epochs=[])
    assert "Best run" not in write_report([tmp_path], tmp_path)
    assert not (tmp_path / "report.png").exists()
    assert "report.png" not in (tmp_path / "report.html").read_text() + (tmp_path / "report.md").read_text()


def test_the_command_reports_across_sweeps_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "0", "ram")
    write_run(tmp_path / "two" / "0", "disk")
    ended = run_python("-X", "importtime", "-m", "vitmnist", "report", "one", "two", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Times: 3.00–3.00 s per epoch, one round, not compared" in ended.stdout
    (page,) = (tmp_path / "outputs" / "reports").rglob("report.html")
    assert ended.stdout.splitlines()[-1] == f"Report: {page.relative_to(tmp_path)}"
    assert "<code>vitmnist report one two</code>" in page.read_text()
    assert 'href="../../../../two/0"' in page.read_text()
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


HOSTILE = '<script>window.hacked = 1</script><img src="http://x/y" onerror="window.hacked = 1"> </svg> & "q"'
LONG = "name" * 60
ODD = timed_run(
    "ram", 1.0, 1.0, environment={"gpu": HOSTILE, "cpu": LONG}, config={"model.name": LONG, "data.root": HOSTILE}
)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_nothing_overflows_the_page_panels_stand_side_by_side_if_wide_and_nothing_is_requested(tmp_path: Path) -> None:
    failed = timed_run("disk", 1.0, status="failed", error=f"{HOSTILE} {LONG}")
    write_report([write(tmp_path, [ODD, {**ODD, "loader": HOSTILE}, failed])], tmp_path)
    requested: list[str] = []
    with chromium() as page:
        page.on("request", lambda request: requested.append(request.url))
        for width, columns in ((1280, 2), (900, 2), (390, 1)):
            page.set_viewport_size({"width": width, "height": 844})
            page.goto((tmp_path / "report.html").as_uri())
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) == 0, width
            assert len({panel.bounding_box()["x"] for panel in page.locator(".panels img").all()}) == columns
            # A table fits its box, whatever it contains.
            for box in page.locator(".scroll:visible").all():
                assert box.bounding_box()["width"] <= width
        assert {url for url in requested if not url.startswith("data:")} == {(tmp_path / "report.html").as_uri()}
        assert page.evaluate("window.hacked") is None
