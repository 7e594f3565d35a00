"""Takes the README's screenshots of a sweep in TensorBoard, and of its report.

python -m docs.scripts.screenshots outputs/sweeps/DATE/TIME docs/pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.browser import chromium, open_hparams, tensorboard


def take_pictures(sweep: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tensorboard(sweep) as address, chromium() as page:
        page.set_viewport_size({"width": 2000, "height": 900})
        open_hparams(page, address)
        page.wait_for_timeout(3000)
        page.screenshot(path=folder / "tensorboard-hparams.png")
        page.set_viewport_size({"width": 1200, "height": 900})
        page.goto((sweep / "report.html").resolve().as_uri())
        page.screenshot(path=folder / "report.png", full_page=True)


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]), Path(sys.argv[2]))
