"""`report.html` in a real browser: readable at any width, without requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from docs.scripts.screenshots import CHROMIUM, chromium
from tests.support.records import timed_run, write
from vitmnist.report.write import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
HOSTILE = '<script>window.hacked = 1</script><img src="http://x/y" onerror="window.hacked = 1"> </svg> & "q"'
LONG = "name" * 60
ODD = timed_run(
    "ram", 1.0, environment={"gpu": HOSTILE, "cpu": LONG}, config={"model.name": LONG, "data.root": HOSTILE}
)


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
