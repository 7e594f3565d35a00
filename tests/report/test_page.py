"""`report.html` in a real browser: readable at any width, without requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from docs.scripts.screenshots import CHROMIUM, chromium
from tests.support.records import LOST, Records, a, write
from vitmnist.report.write import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
HOSTILE = '<script>window.hacked = 1</script><img src="http://x/y" onerror="window.hacked = 1"> </svg> & "q"'
LONG = "name" * 60
ODD = a("ram", 1.0, environment={"gpu": HOSTILE, "cpu": LONG}, config={"model.name": LONG, "data.root": HOSTILE})
REPORTS: dict[str, Records] = {
    "no epochs": [LOST],
    "hostile names": [ODD, {**ODD, "loader": HOSTILE}, a("disk", 1.0, status="failed", error=f"{HOSTILE} {LONG}")],
}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_overflows_the_page_and_nothing_is_requested(name: str, page: Page, tmp_path: Path) -> None:
    write_report([write(tmp_path, REPORTS[name])], tmp_path)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto((tmp_path / "report.html").as_uri())
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) == 0, width
        expect(page.get_by_role("img", name="Seconds per epoch")).to_be_visible()
        for box in page.locator(".scroll").all():  # each fits, whatever it contains
            assert box.bounding_box()["width"] <= width
    assert set(asked) == {(tmp_path / "report.html").as_uri()}
    assert page.evaluate("window.hacked") is None
