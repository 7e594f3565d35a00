"""`predict` classifies picture files, and names those that it cannot read."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import CallHere
from vitmnist import load_dataset
from vitmnist.cli.predict import predict
from vitmnist.data.image_listing import find_images
from vitmnist.errors import DataError
from vitmnist.inference.trained_model import load_model


def test_images_of_any_size_and_mode_are_classified(trained: Path, call_here: CallHere) -> None:
    model = load_model(trained / "run", device="cpu")
    test = load_dataset("mnist", root=str(trained / "data"), test_size=300).test
    paths = [trained / f"{index}.png" for index in range(20)]
    for index, path in enumerate(paths):
        pixels, mode = test.images[index, 0].numpy(), ("L", "RGB", "RGBA", "I;16")[index % 4]
        image = Image.fromarray(pixels.astype("uint16") * 257 if mode == "I;16" else pixels)
        (image if mode == "I;16" else image.resize((28 + 28 * (index % 3),) * 2).convert(mode)).save(path)
    rows = list(predict(model, paths))
    correct = [int(row["class"]) == label for row, label in zip(rows, test.labels[:20].tolist(), strict=True)]
    assert sum(correct) >= 15
    assert all(sum(row["all"].values()) == pytest.approx(1) for row in rows)
    assert all(row["probability"] == row["all"][row["class"]] == max(row["all"].values()) for row in rows)
    Image.fromarray(255 - test.images[0, 0].numpy()).save(trained / "inverted.png")
    (inverted,) = predict(model, [trained / "inverted.png"], invert=True)
    assert inverted["all"] == pytest.approx(rows[0]["all"], abs=1e-5)
    printed = call_here("predict", "run", "0.png", "1.png", folder=trained).stdout
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["0.png", "1.png"]
    as_json = call_here("predict", "run", "--json", "0.png", folder=trained).stdout
    assert json.loads(as_json)[0]["class"] == rows[0]["class"]


def test_a_file_that_is_no_picture_does_not_stop_the_others(trained: Path, call_here: CallHere) -> None:
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(trained / "black.png")
    (trained / "Thumbs.db").write_bytes(b"no image")
    Image.fromarray(np.full((20, 20), np.nan, np.float32)).save(trained / "nan.tif")
    ended = call_here("predict", "run", "Thumbs.db", "nan.tif", "black.png", folder=trained)
    assert ended.returncode == 1
    assert ended.stdout.startswith("black.png: ")
    assert "error: Thumbs.db: cannot be read as an image" in ended.stderr
    assert "nan.tif: cannot be read as an image: some of its pixels are not finite" in ended.stderr
    rows = json.loads(call_here("predict", "run", "--json", "Thumbs.db", "black.png", folder=trained).stdout)
    assert [sorted(row) for row in rows] == [["error", "file"], ["all", "class", "file", "probability"]]
    table = call_here("predict", "run", "--csv", "Thumbs.db", "black.png", folder=trained)
    damaged, black = csv.DictReader(table.stdout.splitlines())
    assert (table.returncode, damaged.pop("file"), set(damaged.values())) == (1, "Thumbs.db", {""})
    assert (black["file"], black["class"], float(black["probability"])) == tuple(
        rows[1][key] for key in ("file", "class", "probability")
    )
    assert {name: float(black[f"probability_{name}"]) for name in rows[1]["all"]} == rows[1]["all"]


def test_predict_takes_folders_and_patterns(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.png", "b/1.png", "b/deep/3.PNG", "[odd].png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9)).save(name)
    Path("b/notes.txt").write_text("not an image", encoding="utf-8")
    Path("none").mkdir()
    folder = ["b/1.png", "b/2.png", "b/deep/3.PNG"]
    for names, expected in (
        (["b"], folder),
        (["b/[12].png"], folder[:2]),
        (["**/*.png"], ["[odd].png", *folder[:2]]),
        (["b/2.png", "b", "?"], [folder[1], folder[0], folder[2]]),
        (["[odd].png", "absent.png"], ["[odd].png", "absent.png"]),
    ):
        assert list(map(str, find_images(names))) == expected
    with pytest.raises(DataError, match=r"none: holds no image \(\.jpg"):
        find_images(["b", "none"])
    with pytest.raises(DataError, match=r"x\*: matches no file"):
        find_images(["x*"])
    monkeypatch.setattr("vitmnist.cli.predict.BATCH_SIZE", 2)
    rows = predict(load_model(trained / "run", device="cpu"), find_images(["b"]))
    assert [row["file"] for row in rows] == folder
