"""Fixtures of the tests of datasets."""

from pathlib import Path

import pytest

from tests.support.image_folders import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")
