"""Models of torchvision and timm by name: their weights fit other classes, sizes and channels, and are needed once."""

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from tests.conftest import Printed, weights
from tests.models.test_models import VIT
from vitmnist.cli.evaluate import main as evaluate_main
from vitmnist.config.compose import compose
from vitmnist.errors import ConfigError
from vitmnist.models import MODELS
from vitmnist.models.pretrained import TorchvisionOptions
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.training.fine_tuning import find_layers, load_pretrained_weights, scale_learning_rates

RESNET = ["model=torchvision", "model.architecture=resnet18"]


def make(library: str, architecture: str, shape: tuple[int, int, int], **options: object) -> nn.Module:
    values = MODELS.with_defaults({"name": library, "architecture": architecture, **options})
    return MODELS.build(values, shape, 7).eval()


@pytest.mark.parametrize(
    ("library", "architecture", "size", "layers"),
    [
        ("torchvision", "resnet18", 64, 6),
        ("torchvision", "vit_b_16", 64, 14),
        ("torchvision", "vgg11", 64, 0),
        ("timm", "vit_tiny_patch16_224", 64, 14),
        ("timm", "resnet18", 64, 10),
    ],
)
def test_weights_fit_other_classes_sizes_and_channels(library: str, architecture: str, size: int, layers: int) -> None:
    """For a grey image, the first convolution gives what it gives for the same image in colour."""
    build = torchvision.models.get_model if library == "torchvision" else timm.create_model
    state = build(architecture).state_dict()
    grey, colour = (make(library, architecture, (channels, size, size)) for channels in (1, 3))
    for model in (grey, colour):
        load_pretrained_weights(model, dict(state), [], classes=7)
    images = torch.randn(2, 1, size, size)
    stems = [next(module for module in model.modules() if isinstance(module, nn.Conv2d)) for model in (grey, colour)]
    torch.testing.assert_close(stems[0](images), stems[1](images.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
    assert colour(images.expand(-1, 3, -1, -1)).shape == (2, 7)
    kept = [name for name, value in colour.state_dict().items() if value.shape == state[name].shape]
    assert all(torch.equal(colour.state_dict()[name], state[name]) for name in kept)
    assert len(state) - len(kept) <= 3  # The weight and bias of the head, and the positions of a ViT.
    assert len(set(find_layers(colour).values())) == layers


def test_layer_decay_shrinks_the_learning_rate_from_the_head_to_the_input() -> None:
    model = MODELS.build(VIT, (1, 28, 28), 10)
    values = OPTIMIZERS.with_defaults({"name": "adamw", "lr": 1.0, "layer_decay": 0.5})
    optimizer = OPTIMIZERS.build(values, model, False)
    scale_learning_rates(optimizer, model, {"head.0.*": 0.1}, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[parameter]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates["head.2.weight"] == 1.0
    assert rates["head.0.weight"] == pytest.approx(0.1)
    for block in range(6):
        assert rates[f"blocks.{block}.mlp.1.weight"] == 0.5 ** (6 - block)
    assert rates["embed.weight"] == rates["positions"] == 0.5**7
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay=0\.5: the model has no ordered blocks"):
        scale_learning_rates(optimizer, nn.Linear(2, 2), {}, 0.5)


def test_a_run_starts_from_a_file_of_torchvision_and_never_needs_it_again(
    quick: list[str], tmp_path: Path, succeed: Printed, output_of: Printed
) -> None:
    state = torchvision.models.resnet18().state_dict()
    save_file(state, tmp_path / "resnet18.safetensors")
    typed = [word for word in quick if not word.startswith("model")] + RESNET
    output = succeed(*typed, "model.weights=resnet18.safetensors", "optimizer.lr=1e-30", "hydra.run.dir=run")
    assert "weights of resnet18 expect images of 224×224 (data.dataset.size) with mean [0.485, 0.456, 0.406]" in output
    trained = weights(tmp_path / "run")
    assert torch.allclose(trained["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    assert trained["fc.weight"].shape == (10, 512)
    (tmp_path / "resnet18.safetensors").unlink()
    succeed("resume=run", "epochs=3")
    output_of(evaluate_main, "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.architecture=resnet19"], "model.architecture=resnet19: did you mean 'resnet18'"),
        (["model.weights=none.pt"], "model.weights=none.pt: there is no such folder of a run"),
        (["model.weights=a.pt", "init=b.pt"], "init and model.weights both name initial weights"),
        (["model.architecture=vit_b_16"], "model=torchvision vit_b_16: fails on images [1, 28, 28]"),
        (["model=timm", "model.architecture=resnet19"], "model.architecture=resnet19: timm has no such model"),
        (["model=timm", "model.architecture=vgg11", "model.drop_path=0.1"], "model.drop_path=0.1: vgg11 has none"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_sentence(
    overrides: list[str], message: str, quick: list[str], refuse: Printed
) -> None:
    typed = [word for word in quick if not word.startswith("model")]
    assert message in refuse(*typed, "model=torchvision", *overrides)


def test_weights_of_torchvision_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library compares the hash of a download."""
    asked: dict[str, object] = {}
    enum = torchvision.models.get_model_weights("resnet18")
    monkeypatch.setattr(enum, "get_state_dict", lambda *parts, **options: asked.update(options) or {})
    assert TorchvisionOptions("resnet18").download() == {}
    assert asked["check_hash"] is asked["weights_only"] is True
    assert compose(RESNET).model["weights"] is None
