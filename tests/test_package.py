"""What pip installs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_the_wheel_carries_configuration_and_data(tmp_path: Path, quick: list[str]) -> None:
    """What pip installs works without the repository, from any folder."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "wheel"),
    ]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    names = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {"vitmnist/py.typed", "vitmnist/conf/config.yaml", "vitmnist/data/mnist/README.md"} <= names
    assert len([name for name in names if name.endswith("-ubyte.gz")]) == 4
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "conf/"))]
    ended = subprocess.run(
        [sys.executable, "-m", "vitmnist", *quick, "epochs=1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "outputs" / "runs").glob("*/*/result.json"))) == 1
