"""Small files in the format of CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_cifar(root: Path, source: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a torchvision class, of random images, `size` in each; their checksums become the published ones."""
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    classes = 10 if source.base_folder.startswith("cifar-10-") else 100

    def write(file: str, content: bytes) -> str:
        (folder / file).write_bytes(content)
        return hashlib.md5(content).hexdigest()

    def write_batch(file: str) -> list[str]:
        labels = {"labels" if classes == 10 else "fine_labels": generator.integers(0, classes, size).tolist()}
        if classes == 100:
            labels["coarse_labels"] = [19] * size
        return [file, write(file, pickle_batch(generator.integers(0, 256, (size, 3072), dtype=np.uint8), labels))]

    names = [f"class {number}" for number in range(classes)]
    meta = {**source.meta, "md5": write(source.meta["filename"], pickle.dumps({source.meta["key"]: names}, 2))}
    monkeypatch.setattr(source, "meta", meta)
    monkeypatch.setattr(source, "train_list", [write_batch(file) for file, _ in source.train_list])
    monkeypatch.setattr(source, "test_list", [write_batch(file) for file, _ in source.test_list])


def pickle_batch(pixels: np.ndarray, labels: dict[str, list[int]]) -> bytes:
    """A dict as Python 2 and NumPy 1 pickled it for the published files: byte strings, and NumPy's old module names."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    dtype = (
        b"cnumpy\ndtype\n"
        + text("u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"".join(b"J" + struct.pack("<i", side) for side in pixels.shape) + b"\x86"
    data = b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + data + b"tb"
    lists = b"".join(
        text(key) + b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e" for key, values in labels.items()
    )
    return b"\x80\x02}(" + text("batch_label") + text("a batch") + text("data") + array + lists + b"u."
