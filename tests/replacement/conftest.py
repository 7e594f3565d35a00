"""What the tests of replacements share."""

from pathlib import Path

import pytest

from tests.support.pictures import write_pictures


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of pictures."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))
