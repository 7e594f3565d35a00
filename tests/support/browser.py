"""A headless Chromium, and a TensorBoard server to open in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Start a TensorBoard for `logdir`; yields its local address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", ".", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, cwd=logdir, stderr=subprocess.PIPE, text=True) as server:
        try:
            stderr: Any = server.stderr
            yield next(found[0] for line in stderr if (found := re.search(r"http://\S+", line)))
            threading.Thread(target=stderr.read, daemon=True).start()
        finally:
            server.terminate()


def open_hparams(page: Page, address: str) -> None:
    """Show the table of the HParams dashboard."""
    page.goto(f"{address}#hparams")
    expect(page.get_by_text("Trial ID").first).to_be_visible()
