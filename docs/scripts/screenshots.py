"""Takes the screenshot of a report in the documentation.

python -m docs.scripts.screenshots outputs/sweeps/DATE/TIME docs/pictures
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# No requests of the browser's own.
OFFLINE = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
TIMEOUT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of a browser with an empty profile."""
    with sync_playwright() as playwright:
        # Chromium refuses to start its sandbox as root, and in most containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *OFFLINE])
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        page.set_default_timeout(TIMEOUT_MS)
        expect.set_options(timeout=TIMEOUT_MS)
        yield page
        browser.close()


def take_pictures(sweep: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as page:
        page.set_viewport_size({"width": 1200, "height": 900})
        page.goto((sweep / "report.html").resolve().as_uri())
        page.screenshot(path=folder / "report.png", full_page=True)


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]), Path(sys.argv[2]))
