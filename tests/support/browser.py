"""A headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

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
