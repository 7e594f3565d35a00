"""Small files in the format of CIFAR-10 and CIFAR-100."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_cifar(root: Path, source: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of a torchvision class with `size` random images each, and let it expect their checksums."""
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    classes = 10 if source.base_folder.startswith("cifar-10-") else 100

    def write(file: str, content: object) -> list[str]:
        (folder / file).write_bytes(pickle.dumps(content, 2))
        return [file, hashlib.md5((folder / file).read_bytes()).hexdigest()]

    def write_batch(file: str) -> list[str]:
        labels = {"labels" if classes == 10 else "fine_labels": generator.integers(0, classes, size).tolist()}
        return write(file, {"data": generator.integers(0, 256, (size, 3072), dtype=np.uint8), **labels})

    names = {source.meta["key"]: [f"class {number}" for number in range(classes)]}
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": write(source.meta["filename"], names)[1]})
    monkeypatch.setattr(source, "train_list", [write_batch(file) for file, _ in source.train_list])
    monkeypatch.setattr(source, "test_list", [write_batch(file) for file, _ in source.test_list])
