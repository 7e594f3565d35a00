"""Images that are larger than the model's input: a random crop in training, the centre crop everywhere else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import AddMembers, Printed, result_of
from tests.support.image_folders import overrides
from vitmnist.cli.export import FORMATS
from vitmnist.inference.trained_model import load_model
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNNOptions
from vitmnist.registry import Member


@pytest.fixture
def smaller(folder: Path) -> list[str]:
    """Overrides that keep pictures at 20×20, for a model with an input of 12×12."""
    options = ["data.dataset.size=20", "data.dataset.mode=rgb", "data.dataset.resize=crop", "data.normalize=imagenet"]
    model = ["model=vit", "model.patch_size=6", "model.dim=8", "model.depth=1", "model.heads=2", "model.head_dim=4"]
    return [*overrides(folder), *options, *model, "data/augment=crops", "data.crop_size=12", "batch_size=8", "epochs=2"]


def test_a_model_of_the_crops_size_is_trained_and_used(
    smaller: list[str], succeed: Printed, output_of: Printed, tmp_path: Path, folder: Path
) -> None:
    auto = ["data/loader=auto", "data.loader.candidates=[ram,disk]"]
    succeed(*smaller, *auto, "data.holdout=0.25", "hydra.run.dir=run")
    model = load_model(tmp_path / "run", device="cpu")
    assert (model.image_shape, model.preprocess.augment.crop_size) == ((3, 20, 20), (12, 12))
    assert torch.equal(model.preprocess.mean.flatten(), torch.tensor((0.485, 0.456, 0.406)))
    assert torch.equal(model.preprocess.std.flatten(), torch.tensor((0.229, 0.224, 0.225)))

    def printed(program: Any, *arguments: str) -> Any:
        return json.loads(output_of(program, "run", *arguments).splitlines()[-1])

    evaluation = printed("evaluate", "--json", "--predictions", "--weights=last", "--split=validation")
    assert evaluation["acc"] == pytest.approx(result_of(tmp_path / "run")["epochs"][-1]["eval_acc"])
    files = [str(folder / row["image"]) for row in evaluation["predictions"]]
    for row, prediction in zip(
        evaluation["predictions"], printed("predict", "--json", "--weights=last", *files), strict=True
    ):
        assert prediction["probability"] == pytest.approx(row["probability"], abs=1e-6)
    output_of("export", "run", "--format=torch", "--output=model.pt2")
    assert json.loads((tmp_path / "model.pt2.json").read_text())["images"]["shape"] == [None, 3, 20, 20]
    images = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    exported = FORMATS["torch"].load((tmp_path / "model.pt2").read_bytes())
    with torch.inference_mode():
        torch.testing.assert_close(exported(images), model.module(model.preprocess(images)))
    succeed("resume=run", "epochs=3")
    assert len(result_of(tmp_path / "run")["epochs"]) == 3


def test_sizes_that_do_not_fit_are_refused_before_pictures_are_decoded(
    smaller: list[str], refuse: Printed, tmp_path: Path, add_members: AddMembers
) -> None:
    """This includes sizes that only the model's own code refuses."""
    assert "patch_size=5 does not divide the image of 12×12" in refuse(*smaller, "model.patch_size=5")
    assert "data.crop_size=12: must be at most the size of the images, 9×9" in refuse(*smaller, "data.dataset.size=9")
    rigid = Member(CNNOptions, lambda *args: nn.Sequential(nn.Flatten(), nn.Linear(3 * 224**2, args[2])))
    add_members(MODELS, cnn=rigid)
    # From torch 2.15 on, the message names the operation.
    message = (
        r"model=cnn: fails on images \[3, 12, 12\]: RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied"
    )
    refusal = refuse(*(override for override in smaller if not override.startswith("model")), "model=cnn")
    assert re.search(message, refusal)
    assert not (tmp_path / "root").exists()
