"""The recipes of docs/recipes.md train on the same batches to the same weights with and without `from_dataloader`."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.support.pages import blocks, write_block
from tests.support.pictures import draw_photos
from tests.support.processes import run_python

PICTURES = 64
EPOCHS = 2


def run(folder: Path, *arguments: str) -> None:
    ended = run_python("-m", *arguments, folder=folder, timeout=220)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts of the page and 64 pictures."""
    for content in blocks("python", REPOSITORY / "docs" / "recipes.md"):
        if content.startswith("# "):
            write_block(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    draw_photos(PICTURES)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "modules", "variants"),
    [
        ("with_accelerate.py", ["accelerate"], {"plain-1", "plain-2", "workers-1"}),
        ("with_lightning.py", ["lightning"], {"plain-1", "plain-2", "workers-1"}),
        ("with_transformers.py", ["transformers.trainer", "transformers.models.vit"], {"plain-1", "plain-2"}),
        ("with_timm.py", ["timm.data"], {"plain-1", "plain-2", "distributed-2"}),
        ("with_albumentations.py", ["albumentations"], {"plain-1", "plain-2", "workers-1"}),
        ("with_monai.py", ["monai"], {"plain-1", "plain-2", "workers-1"}),
    ],
)
def test_a_recipe_trains_on_the_batches_of_the_original(
    script: str, modules: list[str], variants: set[str], folder: Path
) -> None:
    is_random = script in ("with_albumentations.py", "with_monai.py")
    if is_random and not find_spec(*modules):
        pytest.skip("needs vitmnist[recipes]")
    run(folder, "tests.frameworks.run_recipe", script, str(folder), *modules)
    records: dict[str, Any] = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    ranks = {name.removesuffix(".original") for name in records if name.endswith(".original")}
    assert {name[: name.rindex("-")] for name in ranks} == variants
    for name in ranks:
        original, replaced = records[f"{name}.original"], records[f"{name}.replaced"]
        kind = "TransformedDataset" if is_random else "RowDataset"
        assert replaced.pop("dataset") == kind != original.pop("dataset")
        assert original == replaced
        # timm shards only with `distributed=True`. A script without a framework does not shard.
        is_whole = is_random or (script == "with_timm.py" and name.startswith("plain"))
        part = 2 if "-2-" in name and not is_whole else 1
        assert sum(len(labels) for labels, _ in original["seen"]) == EPOCHS * PICTURES // part
