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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitmnist.errors import DataError
from vitmnist.runtime.failures import is_device_error, is_out_of_memory
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 6
"""Increase it when a checkpoint's fields change their meaning, or when resuming would train differently."""
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
    last, previous = place / "last.pt", place / "previous.pt"
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getvalue()
    content += hashlib.sha256(content).digest()
    try:
        place.mkdir(exist_ok=True)
        for unfinished in place.glob(".*.*.*"):  # .last.pt.TOKEN, left by a process that was killed while writing
            unfinished.unlink()
        if best:  # first: a run that is killed after it repeats this epoch, and writes the file again
            write_atomic(place / "best.pt", content)
        is_complete = last.exists() and _content(last.read_bytes()) is not None
        write_atomic(last, content, previous if is_complete else None)  # a damaged one must not replace previous.pt
    except OSError as error:
        kept = "; the previous checkpoint is kept" if last.exists() or previous.exists() else ""
        raise DataError(f"cannot write the checkpoint {error.filename or place}: {error.strerror}{kept}") from error


def load(folder: Path) -> dict[str, Any] | None:
    """The newest undamaged checkpoint of a run, on the CPU; None if there is no checkpoint.

    Raises:
        DamagedError: all checkpoints are damaged.
        DataError: one cannot be read, or is of another version of the program.
    """
    place = folder / FOLDER
    damage: list[str] = []
    for path in (place / "last.pt", place / "previous.pt"):
        if not path.exists():
            continue
        if not path.is_file():  # opening a FIFO would wait for a writer
            damage.append(f"{path}: is not a regular file")
            continue
        try:
            state = read(path)
        except DamagedError as error:
            damage.append(str(error))
            continue
        if damage:
            log.warning("%s; %s is used", damage[0], path.name)
        return state
    if damage:
        raise DamagedError(f"{place}: all checkpoints are damaged:\n" + "\n".join(damage))
    return None


def read(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint; unpickling runs no code of it.

    Raises:
        DamagedError: it is damaged, or not a checkpoint.
        DataError: it cannot be read, or is of another version of the program.
    """
    try:
        content = _content(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; try again later") from error
    if content is None:
        raise DamagedError(f"{path}: is damaged or not a checkpoint: its checksum does not match")
    with reporting_damage(path):
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise DataError(
                f"{path}: was written by another version of the program (checkpoint format {state['format']}; this "
                f"version has {FORMAT}); start a new run, or resume it with that version"
            )
        return state


def _content(stored: bytes) -> bytes | None:
    """What precedes the checksum of a stored file; None if the checksum does not match."""
    content = stored[:-DIGEST_SIZE]
    return content if hashlib.sha256(content).digest() == stored[-DIGEST_SIZE:] else None


@contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Report an error in the block, of any type, as damage of `path`.

    Unpickling, and using values of wrong types and shapes, can raise almost anything.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or is_out_of_memory(error) or is_device_error(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__  # torch's list of missing weights has many lines
        raise DamagedError(f"{path}: is damaged, or not of this version of the program: {reason}") from error
