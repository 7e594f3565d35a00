"""Shared fixtures of the tests of replacements."""

from pathlib import Path

import pytest

from tests.support.pictures import write_pictures


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two classes of pictures."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))
