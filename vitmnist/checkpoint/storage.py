"""Checkpoints: everything that a run needs to go on to the bit, written so that one of them is always whole.

checkpoints/last.pt            the newest           each with its SHA-256 beside it, NAME.sha256
checkpoints/previous.pt        the one before it
checkpoints/best.pt            with a hold-out, the one with the best accuracy on it
checkpoints/final.safetensors  the weights at the end
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import torch

from vitmnist.errors import DataError
from vitmnist.runtime.files import write_whole

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 2
"""Incremented when resuming an older checkpoint would change how the run is trained."""


class OtherFormatError(DataError):
    """A checkpoint of another version of the program."""


def save(folder: Path, state: dict[str, Any], best: bool = False) -> None:
    """Write `last.pt`, and `best.pt` too if asked. Until the new one is whole, the one before it stays.

    Args:
        folder: of the run.
        state: dicts, lists, numbers, strings and tensors; nothing that unpickling would have to call.

    Raises:
        DataError: it cannot be written; the earlier checkpoint is as it was.
    """
    place = folder / FOLDER
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getvalue()
    checksum = f"{hashlib.sha256(content).hexdigest()}  {{}}\n"
    try:
        place.mkdir(exist_ok=True)
        last, previous = place / "last.pt", place / "previous.pt"
        if best:
            # Before the others: whoever is killed here comes by this epoch again. Until it is replaced, the checksum of
            # the one that stands there is kept too.
            sums = place / "best.pt.sha256"
            write_whole(sums, checksum.format("best.pt").encode() + (sums.read_bytes() if sums.exists() else b""))
            write_whole(place / "best.pt", content)
            write_whole(sums, checksum.format("best.pt").encode())
        # Written whole beside it first: a full disk is met before anything is moved. Between the moves a process may be
        # killed, and then a checkpoint and its checksum bear different names; `load` takes any checksum of the folder.
        fresh = place / "next.pt"
        write_whole(place / "next.pt.sha256", checksum.format("next.pt").encode())
        write_whole(fresh, content)
        if last.exists():
            last.replace(previous)
            if (place / "last.pt.sha256").exists():
                write_whole(place / "previous.pt.sha256", (place / "last.pt.sha256").read_bytes())
        write_whole(place / "last.pt.sha256", checksum.format("last.pt").encode())
        fresh.replace(last)
        (place / "next.pt.sha256").unlink()
    except OSError as error:
        raise DataError(
            f"cannot write the checkpoint {error.filename or place}: {error.strerror}; the one before it is kept"
        ) from error


def load(folder: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint of a run, on the CPU; None where there has been none yet.

    Raises:
        DataError: there are checkpoints, and all are damaged, or of another version of the program.
    """
    place = folder / FOLDER
    paths = [place / name for name in ("next.pt", "last.pt", "previous.pt")]
    found = [path for path in paths if path.exists()]
    for left in place.glob(".*"):  # of a write that was killed; nobody else is at work here
        if left.is_file():
            left.unlink()
    damage = []
    for path in found:
        try:
            return read(path)
        except OtherFormatError:
            raise  # not damaged: that version can read it
        except DataError as error:
            damage.append(str(error))
            log.warning("%s; the one before it is used", error)
            if path.name != "previous.pt":
                path.replace(path.with_name(f"{path.name}.damaged"))  # not to be taken for the one before
    if found:
        raise DataError(f"{place}: no checkpoint is whole:\n" + "\n".join(damage))
    return None


def read(path: Path) -> dict[str, Any]:
    """The checkpoint in a file, verified, and unpickled without running anything of it.

    Raises:
        DataError: it is damaged, of another version of the program, or holds anything but plain values and tensors.
    """
    try:
        content = path.read_bytes()
        sums = [line for file in path.parent.glob("*.sha256") for line in file.read_text().splitlines()]
        known = {line.partition(" ")[0] for line in sums}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() not in known:
        raise DataError(f"{path}: is damaged, it does not match its checksum")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise DataError(f"{path}: is no checkpoint: it holds more than plain values and tensors, or less") from error
    if not isinstance(state, dict) or "format" not in state:
        raise DataError(f"{path}: is not a checkpoint of this program")
    if state["format"] != FORMAT:
        raise OtherFormatError(
            f"{path}: was written by another version of the program (format {state['format']}, this one has {FORMAT}), "
            "which would continue training differently; start a new run, or resume it with that version"
        )
    return state
