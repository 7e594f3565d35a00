"""`load_model`: a trained model in Python predicts what `vitmnist predict` and `evaluate` do."""

import json
import multiprocessing
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitmnist
from tests.conftest import Printed, overrides_for
from tests.support.pages import blocks
from tests.support.pictures import draw, write_pictures
from tests.support.processes import REPOSITORY
from vitmnist.checkpoint import storage
from vitmnist.cli.train import main as train
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError, DataError
from vitmnist.inference import trained_model
from vitmnist.inference.trained_model import Prediction, TrainedModel
from vitmnist.runtime.random_state import RandomState

BYTES = "images are bytes 0 to 255; the model normalises them"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_root: Path) -> Path:
    """Two runs: `digits` of grey 28×28 images, and `photos` of pictures of any size, cropped to 24×24 in colour."""
    folder = tmp_path_factory.mktemp("trained")
    write_pictures(folder / "pictures")
    path, crop = f"data.dataset.path={folder / 'pictures'}", ["data.dataset.size=24", "data.dataset.resize=crop"]
    data = ["data/dataset=image_folder", path, "data.dataset.mode=rgb", *crop]
    photos = [*overrides_for(folder / "root"), *data, "epochs=1", "hydra.run.dir=photos"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)
        for overrides in ([*overrides_for(tiny_root), "data.holdout=4", "hydra.run.dir=digits"], photos):
            patch.setattr(sys, "argv", ["train.py", *overrides])
            train()
    return folder


@pytest.fixture(scope="module")
def digits(folder: Path) -> TrainedModel:
    return vitmnist.load_model(folder / "digits", device="cpu")


@pytest.fixture(scope="module")
def photos(folder: Path) -> TrainedModel:
    return vitmnist.load_model(str(folder / "photos"), device="cpu")


@pytest.fixture
def predicted(output_of: Printed, folder: Path) -> Any:
    """What `vitmnist predict` prints for a file."""

    def predict(run: str, file: Path) -> Prediction:
        (row,) = json.loads(output_of("predict", run, "--json", "--device=cpu", str(file), folder=folder))
        return Prediction(row["class"], row["probability"], row["all"])

    return predict


def kinds(file: Path) -> dict[str, Any]:
    """An image file in every form in which a model takes one image."""
    pixels = np.array(Image.open(file))
    tensor = torch.from_numpy(pixels)
    with Image.open(file) as image:
        image.load()
    arrays: dict[str, Any] = {"[H, W] or [H, W, C]": pixels, "torch": tensor, "read-only": np.asarray(image)}
    if tensor.dim() == 2:
        arrays |= {"[H, W, 1]": pixels[..., None], "[1, H, W]": tensor[None], "[1, 1, H, W]": tensor[None, None]}
    else:
        arrays |= {"[1, C, H, W]": pixels.transpose(2, 0, 1)[None], "[1, H, W, C]": tensor[None]}
        arrays |= {"reversed": np.ascontiguousarray(pixels[::-1])[::-1]}
    opened = {"unloaded": Image.open(file), "upload": Image.open(BytesIO(file.read_bytes())), "loaded": image}
    return {"str": str(file), "path": file, "list": [file], "tuple": (pixels,), **arrays, **opened}


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("run", ["digits", "photos"])
def test_every_kind_of_image_is_predicted_as_its_file(
    mode: str, run: str, predicted: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: TrainedModel = request.getfixturevalue(run)
    draw(5, mode).save(tmp_path / "5.png")
    expected = predicted(run, tmp_path / "5.png")
    for kind, image in kinds(tmp_path / "5.png").items():
        assert model(image) == [expected], kind
    if (run, mode) == ("photos", "RGB"):
        assert model(np.array(draw(5)).transpose(2, 0, 1)) == [expected], "[C, H, W]"
    assert sum(expected.probabilities.values()) == pytest.approx(1)
    assert expected.probability == expected.probabilities[expected.label] == max(expected.probabilities.values())


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_opened_jpeg_is_read_as_its_file_and_left_as_it_was(
    photos: TrainedModel, tmp_path: Path, orientation: int
) -> None:
    """Training decodes a large JPEG at a smaller scale, with other pixels than Pillow at full size."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    draw(1).resize((330, 190)).save(tmp_path / "large.jpg", exif=exif)
    expected = photos.read(tmp_path / "large.jpg")
    with Image.open(tmp_path / "large.jpg") as image:
        assert torch.equal(photos.read(image), expected)
        assert (image.size, np.array(image).shape) == ((330, 190), (190, 330, 3))
        loaded = photos.read(image)
    assert (loaded.float() - expected.float()).abs().mean() < 2


def test_a_batch_and_a_list_are_predicted_image_by_image(
    digits: TrainedModel, photos: TrainedModel, tiny: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trained_model, "BATCH_SIZE", 3)
    images = tiny.test.images
    expected = [digits(image)[0].label for image in images]
    assert len(set(expected)) > 1
    image_path = tmp_path / "0.png"
    Image.fromarray(images[0, 0].numpy()).save(image_path)
    mixed = [image_path, images[1:3], Image.fromarray(images[3, 0].numpy()), images[4], images[5:, 0].numpy()]
    for batch in (images, images[:, 0], images.permute(0, 2, 3, 1), images.numpy(), list(images), mixed, iter(mixed)):
        assert [prediction.label for prediction in digits(batch)] == expected
    assert digits([]) == digits(images[:0]) == digits(images[:0, 0]) == []
    assert len(photos(np.zeros((5, 30, 20), np.uint8))) == 5, "grey images without an axis of channels"
    assert len(photos(np.zeros((3, 30, 20), np.uint8))) == 1, "the model's channels come first"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(28, 28), rf"^float32 array \[28, 28\]: {BYTES}: pass uint8$"),
        (np.zeros((1, 28, 28)), f"^float64 array .*: {BYTES}"),
        (np.zeros((28, 28), bool), f"^bool array .*: {BYTES}"),
        (torch.zeros(28, 28, dtype=torch.int64), f"^int64 array .*: {BYTES}"),
        ([np.zeros((28, 28), np.uint8), torch.zeros(28, 28).half()], f"^float16 array .*: {BYTES}"),
        (np.zeros((3, 28, 28), np.uint8), r"array\[None\] for one image and array\[:, None\] for grey ones"),
        (np.zeros((2, 28, 28, 28), np.uint8), "ambiguous"),
        (np.zeros(28, np.uint8), r"uint8 array \[28\]: its axes"),
        (np.zeros((0, 28), np.uint8), "an image cannot be converted: "),
        ([[0, 255], [255, 0]], "^a model takes paths, PIL images, uint8 arrays and lists of these, found int$"),
        ({"image": 3}, "lists of these, found dict$"),
        (b"\x89PNG", "found bytes"),
        (None, "found NoneType$"),
        ("nothing.png", "^nothing.png: cannot be read as an image: No such file"),
        (Path("."), "cannot be read as an image"),
        (Image.new("F", (9, 9)), "an image cannot be converted: .*its 32-bit pixels are 0 to 0"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused_with_the_reason(
    digits: TrainedModel, image: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        digits(image)


def test_a_damaged_image_is_refused(digits: TrainedModel, tmp_path: Path) -> None:
    draw(3).save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[:-50])
    closed = Image.open(tmp_path / "whole.jpg")
    closed.close()
    for image in (tmp_path / "cut.jpg", Image.open(tmp_path / "cut.jpg"), closed):
        with pytest.raises(DataError, match="image"):
            digits([tmp_path / "whole.jpg", image])


def test_a_model_can_be_called_in_threads_and_changes_no_state(
    folder: Path, digits: TrainedModel, tiny: Dataset
) -> None:
    expected = digits(tiny.test.images)
    digits.module.train()  # Dropout and batch statistics would change the predictions.
    modes: set[tuple[bool, bool]] = set()
    hook = digits.module.register_forward_hook(
        lambda module, inputs, logits: modes.add((module.training, logits.requires_grad))
    )
    before = RandomState()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(digits, [tiny.test.images] * 4))
    hook.remove()
    assert results == [expected] * 4
    assert modes == {(False, False)}
    vitmnist.load_model(folder / "digits").evaluate()
    assert not before.list_changed()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert all(parameter.grad is None for parameter in digits.module.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "^nowhere: holds no best or final or last weights"),
        (["digits", "bst"], r"^weights=bst: did you mean 'best'\? allowed: best, final, last$"),
        (["digits", None, "tpu"], "^device=tpu: unknown device"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(
    folder: Path, arguments: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        vitmnist.load_model(*arguments)


def test_weights_are_chosen_by_name_and_verified(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    checkpoints = folder / "checkpoints"
    assert not (checkpoints / "best.pt").exists(), "selected on the test split"
    storage.write_checkpoint(folder, {**storage.read_newest_checkpoint(folder), "is_best": True})
    for name in ("final", "best", "last"):
        assert vitmnist.load_model(folder, name, "cpu").weights.stem == name
    (checkpoints / "best.pt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"best\.pt: is damaged"):
        vitmnist.load_model(folder, "best", "cpu")
    for name in ("best.pt", "final.safetensors"):
        (checkpoints / name).unlink()
    assert vitmnist.load_model(folder, device="cpu").weights.stem == "last"
    with pytest.raises(ConfigError, match="holds no final weights"):
        vitmnist.load_model(folder, "final", "cpu")


def test_predictions_are_computed_in_float32_as_an_evaluation(digits: TrainedModel, tiny: Dataset) -> None:
    modes: list[bool] = []
    with digits.module.register_forward_hook(lambda *_: modes.append(torch.backends.cudnn.allow_tf32)):
        digits.classify(tiny.test.images)
    assert (modes, torch.backends.cudnn.allow_tf32) == ([False], True)


def test_objects_are_shown_in_a_line(digits: TrainedModel, tiny: Dataset) -> None:
    assert repr(tiny) == "Dataset(kmnist: 23 train and 7 test images [1, 28, 28], 10 classes)"
    assert repr(tiny.test) == "Split(7 images [1, 28, 28], 10 classes)"
    assert repr(digits.evaluate("test")).startswith("Evaluation(test split, 7 images, acc ")
    best = Prediction("a", 0.7, {"b": 0.1, "a": 0.7, "d": 0.05, "c": 0.15})
    assert repr(best) == "Prediction(a 70.0%, c 15.0%, b 10.0%)"
    names = {number * "long" * 50: 0.3 for number in (1, 2, 3)}
    shown = [repr(digits.evaluate()), repr(Prediction("", 0.3, names))]
    assert all(len(text) <= 120 and "\n" not in text for text in shown)


def test_the_documented_program_prints_predictions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = (block for block in blocks("python", REPOSITORY / "docs" / "model.md") if "load_model" in block)
    monkeypatch.chdir(folder)
    draw(2).save("scan.png")
    exec(program.replace('"RUN"', '"digits"'), {})
    assert len(capsys.readouterr().out.splitlines()) >= 3
