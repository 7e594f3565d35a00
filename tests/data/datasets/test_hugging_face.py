"""Hugging Face datasets in a folder or in Parquet files are trained on and used as folders of images are."""

import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import CallHere, Printed, result_of
from tests.support.contract import check_contract
from tests.support.pictures import draw
from vitmnist import load_dataset
from vitmnist.data.datasets import hugging_face
from vitmnist.data.images import ColorMode, ImageReader, to_tensor
from vitmnist.errors import ConfigError, DataError, MissingExtraError

pytestmark = pytest.mark.skipif(not find_spec("datasets"), reason="datasets is not installed")
NAMES = ["oak", "ash", "elm"]


def encode(number: int) -> bytes:
    content = io.BytesIO()
    draw(number).save(content, "JPEG" if number % 2 else "PNG")
    return content.getvalue()


def rows(numbers: range, **columns: Any) -> Any:
    """Images with other columns, which are not read."""
    import datasets

    features = {"photo": datasets.Image(), "tree": datasets.ClassLabel(names=NAMES), "note": datasets.Value("string")}
    images = [{"bytes": encode(number)} for number in numbers]
    values = {"photo": images, "tree": [number % 3 for number in numbers], "note": ["old"] * len(numbers)}
    return datasets.Dataset.from_dict(values | columns, datasets.Features(features))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(path: Path, **options: Any) -> Any:
    return load_dataset("hugging_face", root=str(path.parent / "root"), path=str(path), **options)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_splits_are_read_and_every_loader_delivers_the_same(kind: str, tmp_path: Path) -> None:
    import datasets

    both = datasets.DatasetDict({"train": rows(range(30)), "valid": rows(range(30, 39))})
    if kind == "saved":
        both.save_to_disk(tmp_path / "trees")
    else:
        (tmp_path / "trees" / "data").mkdir(parents=True)
        for name, part in both.items():
            part.to_parquet(tmp_path / "trees" / "data" / f"{name}-00000-of-00001.parquet")
    trees = load(tmp_path / "trees", size=[8, 12])
    assert (len(trees.train), len(trees.validation), trees.test) == (30, 9, None)
    assert trees.train.classes == tuple(NAMES)
    read = ImageReader((8, 12), ColorMode.rgb, draft=True)
    for name, image, label in zip(trees.train.files.names, trees.train.images, trees.train.labels, strict=True):
        number = int(Path(name).name)
        (tmp_path / "image").write_bytes(encode(number))
        assert torch.equal(image, to_tensor(read(tmp_path / "image")))
        assert trees.train.classes[label] == NAMES[number % 3]
    for loader, options in {"ram": {}, "cache": {}, "disk": {"threads": 3}}.items():
        check_contract(loader, trees.train, **options)


def test_a_run_is_resumed_and_used(tmp_path: Path, succeed: Printed, call_here: CallHere) -> None:
    path = tmp_path / "trees.parquet"
    rows(range(30)).to_parquet(path)
    data = ["data/dataset=hugging_face", "data.dataset.path=trees.parquet", "data.root=root", "model=cnn"]
    succeed(*data, "epochs=1", "hydra.run.dir=run")
    assert result_of(tmp_path / "run")["config"]["data"]["dataset"]["mode"] == "rgb"
    succeed("resume=run", "epochs=2")
    assert len(result_of(tmp_path / "run")["epochs"]) == 2
    typed = ["run", "--json", "--predictions", "--weights=last"]
    row = json.loads(call_here("evaluate", *typed).stdout.splitlines()[-1])["predictions"][0]
    (tmp_path / "0.jpg").write_bytes(encode(int(Path(row["image"]).name)))
    (predicted,) = json.loads(call_here("predict", "run", "--json", "--weights=last", "0.jpg").stdout)
    assert predicted["probability"] == pytest.approx(row["probability"], abs=1e-6)
    before = load(path).train.images
    rows(range(30, 60)).to_parquet(path)
    assert not torch.equal(load(path).train.images, before)


def test_unreadable_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    path = tmp_path / "trees"
    broken = [{"bytes": b"no image"}, *({"bytes": encode(number)} for number in range(29))]
    rows(range(30), photo=broken).save_to_disk(path)
    with pytest.raises(DataError, match=r"1 of 30 images cannot be read, such as:\n.*train/00000000: cannot be read"):
        load(path)
    assert load(path, skip_unreadable=True).skipped == 1
    with pytest.raises(ConfigError, match=r"columns\.label=kind: must name the column .*; .* are photo, tree, note"):
        load(path, columns={"image": None, "label": "kind"})
    numbered = rows(range(30)).remove_columns("tree").add_column("old", [5 * (number % 3) for number in range(30)])
    numbered.save_to_disk(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"columns\.label=null: must name the column of each label; the columns are"):
        load(tmp_path / "a")
    assert load(tmp_path / "a", columns={"image": "photo", "label": "old"}).train.classes == ("0", "5", "10")
    rows(range(30), tree=[-1] * 30).save_to_disk(tmp_path / "hidden")
    with pytest.raises(DataError, match=r"columns photo and tree: int2str raised ValueError: Invalid integer .* -1"):
        load(tmp_path / "hidden")
    unlabelled = rows(range(30), tree=[None] * 30).cast_column("tree", datasets.Value("string"))
    unlabelled.save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(DataError, match="columns photo and tree: row 0 of train has no label"):
        load(tmp_path / "unlabelled", columns={"image": "photo", "label": "tree"})
    parts = {name: rows(range(9)) for name in ("train", "valid", "validation")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "twice")
    with pytest.raises(ConfigError, match=r"at most one val and test; found train, valid, validation"):
        load(tmp_path / "twice")
    (tmp_path / "b.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"data\.dataset\.path=.*b\.parquet cannot be read: "):
        load(tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"none: there is no such folder or Parquet file"):
        load(tmp_path / "none")
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"run pip install 'vitmnist\[hugging_face\]'"):
        load(path)
