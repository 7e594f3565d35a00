"""Fixtures of the tests of datasets."""

from pathlib import Path

import pytest

from tests.support.image_folders import CLASSES, SIZES, write_folder, write_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    """A folder with `train/`, `val/` and `test/`."""
    for number, (split, size) in enumerate(SIZES.items()):
        for label, name in enumerate(CLASSES):
            for index in range(size):
                write_image(tmp_path / "images" / split / name / f"{index}.png", 100 * number + 10 * label + index)
    return tmp_path / "images"
