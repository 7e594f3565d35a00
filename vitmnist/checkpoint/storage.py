"""Checkpoint files, written so that a complete one exists at any moment.

checkpoints/last.pt            the newest
checkpoints/previous.pt        the one before it
checkpoints/best.pt            with a validation split, the one with the best monitored metric
checkpoints/final.safetensors  the weights at the end

A `.pt` file is what `torch.save` writes, followed by the SHA-256 of it. `torch.load` ignores these 32 bytes.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitmnist.errors import DataError, classify, printable
from vitmnist.runtime.files import display_path, write_atomic

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 9
"""The format number is raised when a field changes its meaning, or when resuming would train differently."""
DIGEST_SIZE = hashlib.sha256().digest_size

_intact: set[Path] = set()
"""Files `last.pt` that this process has written or verified, so that they may become `previous.pt`."""


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
    checkpoints = folder / FOLDER
    last, previous = checkpoints / "last.pt", checkpoints / "previous.pt"
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getvalue()
    content += hashlib.sha256(content).digest()
    try:
        checkpoints.mkdir(exist_ok=True)
        if best:  # before last.pt: a run killed in between repeats the epoch and writes it again
            write_atomic(checkpoints / "best.pt", content)
        write_atomic(last, content, previous if last in _intact and last.exists() else None)
        _intact.add(last)
    except OSError as error:
        kept = ""
        if last.exists() or previous.exists():
            kept = f"; the previous checkpoint is kept, and resume={display_path(folder)} continues from it"
        raise DataError(
            f"cannot write the checkpoint {error.filename or checkpoints}: {error.strerror}{kept}"
        ) from error


def load(folder: Path) -> dict[str, Any] | None:
    """The newest undamaged checkpoint of a run, on the CPU; None if there is no checkpoint.

    Raises:
        DamagedError: all checkpoints are damaged.
        DataError: one cannot be read, or is of another version of the program.
    """
    last, previous = folder / FOLDER / "last.pt", folder / FOLDER / "previous.pt"
    _intact.discard(last)
    if last.exists():
        try:
            state = read(last)
        except DamagedError as error:
            if not previous.exists():
                raise
            log.warning("%s; %s is read instead", error, previous.name)
        else:
            _intact.add(last)
            return state
    return read(previous) if previous.exists() else None


def read(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint; unpickling runs no code from it.

    Raises:
        DamagedError: it is damaged, or not a checkpoint.
        DataError: it cannot be read, or is of another version of the program.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; try again later") from error
    if hashlib.sha256(memoryview(content)[:-DIGEST_SIZE]).digest() != content[-DIGEST_SIZE:]:
        raise DamagedError(f"{path}: is damaged or not a checkpoint: its checksum does not match")
    with reporting_damage(path):
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise DataError(
                f"{path}: was written by another version of the program (checkpoint format {state['format']!r:.40}; "
                f"this version has {FORMAT}); start a new run, or resume it with that version"
            )
        return state


@contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Report an error in the block, of any type, as damage of `path`.

    Unpickling, and using values of wrong types and shapes, can raise almost anything.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or classify(error).cause in ("memory", "device"):
            raise
        message = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(message.split()) or type(error).__name__  # torch's list of missing weights has many lines
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:  # torch advises to load it anyway
            reason = "its content is not only plain values and tensors"
        reason = printable(reason)[:1000]
        raise DamagedError(
            f"{path}: is damaged, or not of this version of the program or of the model's code: {reason}"
        ) from error
