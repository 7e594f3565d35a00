"""What pip installs."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

import vitmnist
from tests.conftest import Train
from tests.support.processes import REPOSITORY


def imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(name)):
                yield name


def requirement_names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_every_import_is_declared_and_every_dependency_imported() -> None:
    """The core has nothing that only an extra needs, and relies on nothing that another package happens to need."""
    project = pytest.importorskip("tomllib").loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    core = requirement_names(project["dependencies"])
    extras = requirement_names(chain(*project["optional-dependencies"].values()))
    sources = [path.read_text() for path in (REPOSITORY / "vitmnist").rglob("*.py")]
    modules = {name.partition(".")[0] for source in sources for name in imported_modules(source)} - {"vitmnist"}
    providers = packages_distributions()  # without the standard library
    imported = {providers[module][0].lower() for module in modules if module in providers}
    assert core <= imported <= core | extras


def test_version_is_that_of_the_package(train_here: Train) -> None:
    ended = train_here("--version", "epochs=many")
    assert (ended.returncode, ended.stdout) == (0, f"vitmnist {vitmnist.__version__}\n")


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(tmp_path: Path) -> None:
    """The installed console script finds its configuration and data without the repository."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, REPOSITORY]
    subprocess.run(build, check=True, capture_output=True)
    wheel = tmp_path / f"vitmnist-{vitmnist.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"vitmnist/py.typed", "vitmnist/conf/config.yaml", "vitmnist/data/mnist/README.md"} <= {*names}
    assert len([name for name in names if name.endswith("-ubyte.gz")]) == 4
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "conf/"))]
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    venv.create(environment)
    install = [sys.executable, "-m", "pip", "--python", environment, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # The dependencies are those of the tests. A path file does not read others, so an editable install is left out.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    folder.mkdir()
    few = ["model=cnn", "data.dataset.train_size=60", "data.dataset.test_size=20", f"data.root={tmp_path / 'data'}"]
    ended = subprocess.run(
        [environment / "bin" / "vitmnist", "data/loader=gpu_slice", "epochs=1", *few],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list(folder.glob("outputs/runs/*/*/result.json"))) == 1
