"""Finding the files of a data set, and downloading them only if they are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError

from vitmnist.errors import DataError

log = logging.getLogger(__name__)

Found = TypeVar("Found")


def find_or_download(
    name: str, root: Path, find: Callable[[], Found | None], fetch: Callable[[], object], files: list[str], folder: Path
) -> Found:
    """What `find` returns; if that is None, what it returns after `fetch` has downloaded `files` into `folder`.

    Raises:
        DataError: the files are not there and cannot be downloaded; says where to put them.
    """
    if found := find():
        return found
    log.info("downloading %s into %s", name, folder)
    reason = "the download left files out"
    try:
        fetch()
    except (RuntimeError, URLError, OSError) as error:
        reason = " ".join(str(error).split())
    if found := find():
        return found
    raise DataError(
        f"{name} is not in {root} and could not be downloaded ({reason[:200]}).\n"
        f"Put {', '.join(files)} into {folder}, or type data.root= and the folder that has them"
    )
