"""Checkpoint files, written so that a complete one exists at any moment.

checkpoints/last.pt            the newest
checkpoints/previous.pt        the one before it
checkpoints/best.pt            with a hold-out, the one with the highest accuracy on it
checkpoints/final.safetensors  the weights at the end

A `.pt` file is what `torch.save` writes, followed by the SHA-256 of it. `torch.load` ignores these 32 bytes.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vitmnist.errors import DataError
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 4
"""Increase it when a checkpoint's fields change their meaning, or when resuming would train differently."""
READ_ATTEMPTS, RETRY_S = 3, 1.0  # a network file system may fail for a moment
ZIP_END = b"PK\x05\x06"  # the last 22 bytes of a file by torch.save begin with it
DIGEST_SIZE = hashlib.sha256().digest_size


class DamagedError(DataError):
    """The content of a checkpoint, or of all checkpoints of a run, is damaged."""


def save(folder: Path, state: dict[str, Any], best: bool = False) -> None:
    """Write `last.pt`, and `best.pt` if `best` is true. The checkpoint before it becomes `previous.pt`.

    Args:
        folder: of the run.
        state: dicts, lists, numbers, strings and tensors; nothing that unpickling would have to call.

    Raises:
        DataError: it cannot be written; the earlier checkpoints are as they were.
    """
    place = folder / FOLDER
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getvalue()
    content += hashlib.sha256(content).digest()
    has_previous = (place / "last.pt").exists()
    try:
        place.mkdir(exist_ok=True)
        if best:  # first: a run that is killed after it repeats this epoch, and writes the file again
            write_atomic(place / "best.pt", content)
        # Complete under another name before anything is moved, so that a full disk or a kill loses nothing.
        write_atomic(place / "next.pt", content)
        _finish_save(place)
    except OSError as error:
        kept = "; the previous checkpoint is kept" if has_previous else ""
        raise DataError(f"cannot write the checkpoint {error.filename or place}: {error.strerror}{kept}") from error


def _finish_save(place: Path) -> None:
    """Make `next.pt`, if it is there, the last checkpoint: also after a kill between two of these steps."""
    new, last = place / "next.pt", place / "last.pt"
    if new.exists():
        if last.exists():
            last.replace(place / "previous.pt")
        new.replace(last)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest undamaged checkpoint of a run, on the CPU; None if there is no checkpoint.

    Raises:
        DamagedError: all checkpoints are damaged.
        DataError: one cannot be read, or is of another version of the program.
    """
    place = folder / FOLDER
    for unfinished in place.glob(".*"):  # left by a process that was killed while writing
        if unfinished.is_file():
            unfinished.unlink()
    damage = []
    _finish_save(place)
    for path in (place / name for name in ("last.pt", "previous.pt")):
        if not path.exists():
            continue
        try:
            return read(path)
        except DamagedError as error:
            damage.append(str(error))
            log.warning("%s", error)
            path.replace(path.with_name(f"{path.name}.damaged"))  # or the next save makes it previous.pt
    if damage:
        raise DamagedError(f"{place}: all checkpoints are damaged:\n" + "\n".join(damage))
    return None


def read(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint; unpickling runs no code of it.

    Raises:
        DamagedError: it is damaged, or not a checkpoint.
        DataError: it cannot be read, or is of another version of the program.
    """
    stored = _read_patiently(path)
    content, digest = stored[:-DIGEST_SIZE], stored[-DIGEST_SIZE:]
    is_verified = hashlib.sha256(content).digest() == digest
    has_digest = not stored[-22:].startswith(ZIP_END)  # a copy may have been written without
    try:
        # Also load files of older versions, without a checksum, to report their format.
        state = torch.load(io.BytesIO(content if is_verified else stored), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises whatever damaged bytes lead it to
        reason = "holds more than plain values and tensors" if is_verified else "its checksum does not match"
        raise DamagedError(f"{path}: is damaged or not a checkpoint: {reason}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise DamagedError(f"{path}: is not a checkpoint of this program")
    if state["format"] != FORMAT:
        raise DataError(
            f"{path}: was written by another version of the program (checkpoint format {state['format']}; this version "
            f"has {FORMAT}); start a new run, or resume it with that version"
        )
    if not is_verified and has_digest:
        raise DamagedError(f"{path}: is damaged, its checksum does not match")
    if not is_verified:
        log.warning("%s: has no checksum; it could be loaded and is used", path)
    return state


def _read_patiently(path: Path) -> bytes:
    for _ in range(READ_ATTEMPTS - 1):
        with suppress(OSError):
            return path.read_bytes()
        log.warning("%s: cannot be read; trying again", path)
        time.sleep(RETRY_S)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; try again later") from error
