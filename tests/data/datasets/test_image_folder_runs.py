"""A folder of images is decoded on all cores, and runs train on it."""

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import CallHere, Printed, Train, result_of
from tests.support.image_folders import load, overrides
from vitmnist.cli import evaluate
from vitmnist.cli.export import describe_model
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.data.datasets import decoding
from vitmnist.data.images import ImageReader, Pixels
from vitmnist.inference.trained_model import load_model
from vitmnist.runtime import memory
from vitmnist.tracking.resume import describe_completed


@pytest.mark.parametrize("loader", ["gpu_slice", "ram"])
def test_the_test_set_must_fit_next_to_the_training_set(
    loader: str, folder: Path, refuse: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets = load(folder)
    free = iter([pets.train.nbytes + pets.test.nbytes - 1, pets.test.nbytes - 1])
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: next(free))
    printed = refuse(*overrides(folder), f"data/loader={loader}", "device=cpu")
    assert re.search(rf"{loader}: the dataset takes .* are free; try data/loader=", printed)


@pytest.mark.needs("POSIX files")
def test_images_are_decoded_on_all_cores_in_the_same_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cat" / "4.png").write_bytes(b"no image")
    options = {"skip_unreadable": True, "mode": "rgb"}
    expected = load(folder, **options)
    shutil.rmtree(folder.parent / "root")
    read_image = ImageReader.__call__
    together, seen, before = threading.Barrier(3), set(), {*threading.enumerate()}

    def read(reader: ImageReader, path: Path) -> Pixels:
        thread = threading.get_ident()
        if len(seen) < 3 and thread not in seen:  # at its first image, a thread waits for the others
            seen.add(thread)
            together.wait(timeout=60)
        return read_image(reader, path)

    monkeypatch.setattr(decoding, "available_cores", lambda: 3)
    monkeypatch.setattr(ImageReader, "__call__", read)
    found = load(folder, **options)
    assert (found.sha256, found.skipped) == (expected.sha256, 1)
    assert (found.train.files, found.test.files) == (expected.train.files, expected.test.files)
    assert len(seen) == 3
    assert not {*threading.enumerate()} - before


def test_a_folder_of_images_can_be_trained_on(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    (folder / "dog" / "3.png").write_bytes(b"")
    options = ["data.dataset.skip_unreadable=true", "data.dataset.size=[14,28]", "hydra.run.dir=run", "epochs=1"]
    ended = train_here(*overrides(folder), *options)
    assert ended.returncode == 0, ended.stderr
    assert "evaluated on the test split, 6 images" in ended.stdout
    result = result_of(tmp_path / "run")
    recorded = result["config"]["data"]["dataset"]
    assert (result["dataset"]["skipped"], recorded["name"], recorded["mode"]) == (1, "image_folder", "rgb")
    trained = load_model(tmp_path / "run", device="cpu")
    assert (trained.image_shape, trained.dataset["mode"]) == ((3, 14, 28), "rgb")
    assert trained(folder / "dog" / "4.png")[0] == trained(Image.open(folder / "dog" / "4.png"))[0]
    assert call_here(evaluate.main, "run").stderr == ""
    assert "divided its images differently" in call_here(evaluate.main, "run", "data.dataset.test_share=0.5").stderr
    # A sweep compares a completed job with the values that it composes again, such as `mode: auto`.
    assert describe_completed(tmp_path / "run", validate(Config, compose([*overrides(folder), *options])))
    copy = shutil.copytree(folder, tmp_path / "copy")
    for number in range(10):
        shutil.copy(folder / "dog" / "4.png", folder / "dog" / f"new-{number}.png")
    ended = call_here(evaluate.main, "run", f"data.root={tmp_path / 'root'}")  # this folder has no decoded images
    assert "warning: the images of the test split have changed since training" in ended.stderr
    assert train_here("resume=run", f"data.dataset.path={copy}", "epochs=2").returncode == 0
    refused = train_here(*overrides(folder), "epochs=1")
    assert (refused.returncode, "3.png" in refused.stderr, "Traceback" in refused.stderr) == (1, True, False)


def test_images_of_16_and_32_bits_are_predicted_as_evaluated(
    folder: Path, train_here: Train, call_here: CallHere, tmp_path: Path
) -> None:
    for number, path in enumerate(sorted(folder.glob("*/*.png"))):
        Image.fromarray(np.full((9, 9), 0.01 * number, np.float32)).save(path.with_suffix(".tif"))
        Image.fromarray(np.random.default_rng(number).integers(0, 65_536, (14, 20), dtype=np.uint16)).save(path)
    typed = [*overrides(folder), "data.dataset.range_32_bit=[0,0.5]", "data.dataset.resize=pad", "model=cnn"]
    assert train_here(*typed, "hydra.run.dir=run", "epochs=1").returncode == 0
    model = load_model(tmp_path / "run", device="cpu")
    evaluation = model.evaluate(overrides=["data.dataset.test_share=0"]).split
    for name in ("dog/7.tif", "dog/7.png"):
        pixels = evaluation.images[evaluation.files.names.index(name)]
        assert np.array_equal(model.reader(folder / name)[..., 0], pixels[0])
    assert pixels.float().std() > 0
    assert '"range_32_bit": [\n      0.0,\n      0.5\n    ]' in describe_model("model.pt2", b"", model, "")
