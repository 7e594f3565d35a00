"""Members are found by their modules, and a name belongs to one member."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from vitmnist import load_dataset
from vitmnist.augment.base import OPERATIONS
from vitmnist.config.schema import (
    iterate_registries,
)
from vitmnist.data.datasets.base import DATASETS
from vitmnist.registry import import_members

REGISTRIES = tuple(registry for _, registry in iterate_registries())


def test_a_module_is_found_by_being_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added.py").touch()
    for registry in (OPERATIONS, *REGISTRIES):
        package = import_module(registry.package)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        import_members.cache_clear()
        registry.members()
        assert sys.modules.pop(f"{registry.package}.added").__file__ == str(tmp_path / "added.py")


def test_a_registered_name_is_not_taken_again() -> None:
    """This also holds for a `partial`, which has no name."""
    DATASETS.members()
    with pytest.raises(ValueError, match="data/dataset: 'fashion_mnist' is registered already"):
        DATASETS.register("fashion_mnist")(load_dataset)
