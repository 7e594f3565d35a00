"""`report.html` in a real browser: readable at any width, in both modes and on paper; sortable; without requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import CHROMIUM, chromium
from tests.support.records import LOST, Records, a, rounds, run, write
from vitmnist.report.write import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
HOSTILE = '<script>window.hacked = 1</script><img src="http://x/y" onerror="window.hacked = 1"> </svg> & "q"'
LONG = "name" * 60
ODD = a("ram", 1.0, environment={"gpu": HOSTILE, "cpu": LONG}, config={"model.name": LONG, "data.root": HOSTILE})
REPORTS: dict[str, Records] = {
    "no epochs": [LOST],
    "sixty runs": [a(loader, 1.0, batch_size=size) for loader in ("disk", "ram", "cache") for size in range(1, 21)],
    "hostile names": [ODD, {**ODD, "loader": HOSTILE}, a("disk", 1.0, status="failed", error=f"{HOSTILE} {LONG}")],
}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        yield page


def open_report(page: Page, folder: Path, width: int = 1280) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto((folder / "report.html").as_uri())


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_overflows_the_page_and_nothing_is_requested(name: str, page: Page, tmp_path: Path) -> None:
    write_report([write(tmp_path, REPORTS[name])], tmp_path)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for width in (1280, 390):
        open_report(page, tmp_path, width)
        assert overflow(page) == 0, width
        expect(page.get_by_role("img", name="Seconds per epoch")).to_be_visible()
        for box in page.locator(".scroll").all():  # each fits, whatever it contains
            assert box.bounding_box()["width"] <= width
    assert set(asked) == {(tmp_path / "report.html").as_uri()}
    assert page.evaluate("window.hacked") is None


def test_columns_sort_by_click_and_by_keyboard(page: Page, tmp_path: Path) -> None:
    times = {"disk": 12.0, "ram": 0.75, "gpu_slice": 9.5, "prefetch": 0.0001}
    records = [a(loader, time, images_per_s=1000 * time) for loader, time in times.items()]
    write_report([write(tmp_path, [*records, LOST])], tmp_path)
    open_report(page, tmp_path)
    table = page.get_by_role("table").first

    def loaders() -> list[str]:
        return table.locator("tbody tr td:first-child").all_text_contents()

    header = table.get_by_role("columnheader", name="epoch, s")
    header.get_by_role("button").click()
    assert loaders() == ["prefetch", "ram", "gpu_slice", "disk", "cache"]  # what was not measured comes last
    expect(header).to_have_attribute("aria-sort", "ascending")
    header.get_by_role("button").press("Enter")
    assert loaders() == ["disk", "gpu_slice", "ram", "prefetch", "cache"]
    expect(header).to_have_attribute("aria-sort", "descending")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert loaders() == ["cache", "disk", "gpu_slice", "prefetch", "ram"]
    expect(table.locator("th[aria-sort]")).to_have_count(1)
    facts = page.get_by_role("table").last
    expect(facts.get_by_role("button")).to_have_count(0)


def test_the_chart_has_the_colour_of_the_text_and_a_print_is_light_complete_and_without_controls(
    page: Page, tmp_path: Path
) -> None:
    """The print on A4 paper, landscape."""
    run(tmp_path / "long", "cache", status="failed", error=LONG)
    write_report([write(tmp_path, rounds(8, ram=1.0, disk=2.0))], tmp_path)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        open_report(page, tmp_path, 1032)
        colours: list[str] = []
        for elements, name in (("p", "color"), ("svg text", "fill"), ('[style*="stroke: #000000"]', "stroke")):
            found = page.locator(elements)
            assert found.count()
            colours += found.evaluate_all(f"found => found.map(element => getComputedStyle(element).{name})")
        assert set(colours) == {"rgb(0, 0, 0)" if scheme == "light" else "rgb(255, 255, 255)"}
    page.get_by_role("button", name="epoch, s").click()
    page.emulate_media(media="print", color_scheme="dark")
    assert overflow(page) == 0
    button = "getComputedStyle(document.querySelector('th[aria-sort] button'), '::after').content"
    assert page.evaluate(button) == "none"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    for box in page.locator(".scroll").all():
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.emulate_media(media="screen", color_scheme="light")
