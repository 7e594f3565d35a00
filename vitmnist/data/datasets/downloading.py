"""Downloading by torchvision, which compares what it downloads with the published MD5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

from vitmnist.errors import DataError


def download(name: str, root: Path, fetch: Callable[[], Any], files: list[str], folder: Path) -> Any:
    """What `fetch` returns, after it has downloaded `files` into `folder`; raises `DataError` if it cannot."""
    try:
        return fetch()
    except (RuntimeError, URLError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{name} is not in {root} as it was published, and could not be downloaded ({reason[:200]}).\n"
            f"Put {', '.join(files)} into {folder}, or type data.root= and the folder that has them"
        ) from error
