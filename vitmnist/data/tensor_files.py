"""Images and labels in two files, to which chunks of samples are appended, and which are mapped into memory."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch
from torch import Tensor

from vitmnist.data.tensors import TensorSet
from vitmnist.errors import DataError

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's mmap since 3.11

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.uint16, torch.uint32, torch.uint64, torch.complex64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


class DamagedError(Exception):
    """The files of a cache are not what was written."""


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values with their checksum."""
    return {**values, "checksum": _checksum(values)}


def unseal(sealed: Any) -> dict[str, Any]:
    """The values of `seal`; raises `DamagedError` if they have changed."""
    if not isinstance(sealed, dict):
        raise DamagedError("it is no record")
    values = {key: value for key, value in sealed.items() if key != "checksum"}
    if sealed["checksum"] != _checksum(values):
        raise DamagedError("its record was changed")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class TensorWriter:
    """Appends chunks of images and labels to two files.

    `record` has the shape, dtype and checksum of what has been written, by the names `images` and `labels`.
    """

    def __init__(self, images: IO[bytes], labels: IO[bytes]) -> None:
        self.record: dict[str, Any] = {}
        self._files = {"images": images, "labels": labels}
        self._checksums = {name: hashlib.sha256() for name in self._files}

    def __len__(self) -> int:
        return int(self.record["labels"]["shape"][0]) if self.record else 0

    def append(self, images: Tensor, labels: Tensor) -> None:
        """Write a chunk; raises `DataError` for a dtype that a file cannot hold."""
        samples = len(self) + len(images)
        record = {}
        for name, tensor in (("images", images), ("labels", labels)):
            if str(tensor.dtype) not in DTYPES:
                raise DataError(f"{name}: a cache cannot hold {tensor.dtype}; choose ram or disk")
            content = tensor.contiguous().view(torch.uint8).numpy().data
            self._files[name].write(content)
            self._checksums[name].update(content)
            sha256 = self._checksums[name].hexdigest()  # of all chunks so far
            record[name] = {"shape": [samples, *tensor.shape[1:]], "dtype": str(tensor.dtype), "sha256": sha256}
        self.record = record

    def log(self, journal: IO[bytes], notes: Any) -> None:
        """Add a line to the journal, from which `resume` knows what has been written."""
        self.flush()
        journal.write(json.dumps(seal({"record": self.record, "notes": notes})).encode() + b"\n")
        journal.flush()

    def resume(self, journal: IO[bytes], is_current: Callable[[Any], bool]) -> list[Any]:
        """Continue files that were left unfinished, after the last chunk that is undamaged and in the journal.

        Args:
            is_current: tells from the notes of a chunk whether it can be kept.

        Returns:
            The notes of the chunks that are kept.
        """
        notes, kept = [], 0
        for line in journal:
            try:
                entry = unseal(json.loads(line))
                if not is_current(entry["notes"]):
                    break
                self._adopt(entry["record"])
            except (DamagedError, ValueError, KeyError, TypeError):
                break
            notes.append(entry["notes"])
            kept += len(line)
        ends = {name: _nbytes(self.record[name]) if self.record else 0 for name in self._files}
        for file, end in ((journal, kept), *((file, ends[name]) for name, file in self._files.items())):
            file.seek(end)
            file.truncate()
        return notes

    def _adopt(self, record: dict[str, Any]) -> None:
        """Read up to the end of `record`; raises `DamagedError` if the files hold something else."""
        checksums = {name: checksum.copy() for name, checksum in self._checksums.items()}
        for name, file in self._files.items():
            nbytes = _nbytes(record[name]) - file.tell()
            checksums[name].update(file.read(nbytes))
            if checksums[name].hexdigest() != record[name]["sha256"]:
                raise DamagedError("its checksum does not match")
        self._checksums, self.record = checksums, record

    def flush(self) -> None:
        """Give what has been written to the system."""
        for file in self._files.values():
            file.flush()

    def tensors(self) -> TensorSet:
        """All samples, mapped; raises `DataError` if there are none."""
        if not len(self):
            raise DataError("there is no sample to decode")
        self.flush()
        return TensorSet(*(map_file(file, self.record[name]) for name, file in self._files.items()), mapped=True)


def _nbytes(form: Mapping[str, Any]) -> int:
    count: int = math.prod(form["shape"])
    return count * DTYPES[form["dtype"]].itemsize


def map_file(file: IO[bytes], form: Mapping[str, Any]) -> Tensor:
    """The mapped tensor of a shape and dtype; raises `DamagedError` if the file has another size."""
    shape, dtype = form["shape"], DTYPES[form["dtype"]]
    size, found = _nbytes(form), os.fstat(file.fileno()).st_size
    if found != size:
        raise DamagedError(f"it has {found} bytes, not {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    # Private: writing into a view copies the page and never changes the file. Without a reserve, because the kernel
    # would refuse to map more than memory; torch.from_file has no flags for either.
    flags = {"flags": mmap.MAP_PRIVATE | MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    return torch.frombuffer(mmap.mmap(file.fileno(), size, **flags), dtype=dtype).view(shape)
