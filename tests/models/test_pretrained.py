"""Models of torchvision and timm: their weights are fitted to images and classes, read once, and never needed again."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from tests.conftest import Printed, Train, assert_same_run, weights
from vitmnist import load_model
from vitmnist.errors import ConfigError
from vitmnist.models import MODELS
from vitmnist.models.pretrained import fit_weights
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.training.fine_tuning import find_layers, load_pretrained, scale_learning_rates

pytestmark = pytest.mark.skipif(not find_spec("timm"), reason="timm is not installed")
SMALL = {"torchvision": "shufflenet_v2_x0_5", "timm": "test_resnet"}


def build(library: str, architecture: str, shape: tuple[int, int, int], num_classes: int = 1000) -> Any:
    return MODELS.build({"name": library, "architecture": architecture}, shape, num_classes).eval()


@pytest.mark.slow
def test_a_run_reads_the_weights_once_and_a_stopped_one_ends_as_an_uninterrupted_one(
    quick: list[str], tmp_path: Path, succeed: Printed, output_of: Printed, train_here: Train
) -> None:
    state = build("timm", SMALL["timm"], (3, 28, 28)).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    model = ["model=timm", f"model.architecture={SMALL['timm']}", "model.weights=weights.safetensors"]
    typed = [*quick, *model, "optimizer=adamw", "optimizer.layer_decay=0.75", "ema_decay=0.9"]
    output = succeed(*typed, "hydra.run.dir=whole")
    assert f"started from {len(state) - 2} of {len(state)} weights of model.weights" in output
    assert train_here(*typed, "max_minutes=0", "hydra.run.dir=cut").returncode == 75
    (tmp_path / "weights.safetensors").unlink()
    succeed("resume=cut", "max_minutes=null")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    output_of("evaluate", "cut")
    output_of("export", "cut", "--format", "torch")
    loaded = load_model(tmp_path / "cut", weights="final").module.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(tmp_path / "cut").items())


@pytest.mark.parametrize(
    ("library", "architecture"), [*SMALL.items(), ("torchvision", "mobilenet_v3_small"), ("timm", "test_vit")]
)
def test_a_grey_image_gives_the_same_logits_and_only_a_head_of_other_classes_keeps_its_values(
    library: str, architecture: str
) -> None:
    source = build(library, architecture, (3, 160, 160))
    images = torch.randn(2, 1, 160, 160)
    for channels in (1, 2):
        model = build(library, architecture, (channels, 160, 160))
        load_pretrained(model, source.state_dict(), [], 1000)
        expected = source(images.expand(-1, 3, -1, -1))
        torch.testing.assert_close(model(images.expand(-1, channels, -1, -1)), expected, rtol=1e-3, atol=1e-3)
    model = build(library, architecture, (3, 160, 160), num_classes=10)
    fitted, head = fit_weights(source.state_dict(), model, 10)
    assert [len(model.state_dict()[name]) for name in head] == [10, 10]
    wrong = {name: value for name, value in fitted.items() if name != next(iter(fitted))}
    with pytest.raises(ConfigError, match=r"model\.weights: the weights do not fit this model: .*missing in model\.w"):
        load_pretrained(model, wrong, [], 10)


def test_position_embeddings_are_resized() -> None:
    small, large = (torchvision.models.VisionTransformer(size, 16, 1, 2, 8, 8) for size in (32, 64))
    load_pretrained(small, large.state_dict(), [], 1000)
    assert torch.equal(small.conv_proj.weight, large.conv_proj.weight)
    source = build("timm", "test_vit", (3, 160, 160)).state_dict()
    load_pretrained(build("timm", "test_vit", (1, 32, 32), 5), source, [], 5)


@pytest.mark.parametrize(
    ("model", "old_names"),
    [
        (torchvision.models.DenseNet(4, (2,), 8, num_classes=5), {"norm1": "norm.1", "conv2": "conv.2"}),
        (torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 8), {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}),
    ],
)
def test_names_in_old_files_of_torchvision_are_replaced(model: nn.Module, old_names: dict[str, str]) -> None:
    """Such as those that `model.weights=default` downloads."""
    state = model.state_dict()
    old = {name: torch.ones_like(value) for name, value in state.items() if not name.endswith("num_batches_tracked")}
    for new, old_name in old_names.items():
        old = {re.sub(rf"(layer_?\d+\.){re.escape(new)}", rf"\1{old_name}", name): old[name] for name in old}
    assert not old.keys() <= state.keys()
    load_pretrained(model, old, [], 1000)
    assert all(value.eq(1).all() for name, value in model.state_dict().items() if "num_batches" not in name)


def learning_rates(model: nn.Module, **factors: float) -> dict[str, float]:
    optimizer = OPTIMIZERS.build({"name": "adamw", "lr": 1.0}, model, False)
    scale_learning_rates(optimizer, model, factors, layer_decay=0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def test_learning_rates_fall_from_the_head_to_the_input() -> None:
    rates = learning_rates(MODELS.build({"name": "vit", "depth": 2}, (1, 28, 28), 10), **{"head.*": 0.1})
    expected = {"class_token": 1 / 8, "embed.bias": 1 / 8, "blocks.0.mlp.1.bias": 1 / 4, "blocks.1.mlp.1.bias": 1 / 2}
    assert expected.items() <= rates.items()
    assert rates["head.0.bias"] == 0.1
    rates = learning_rates(build("torchvision", "resnet18", (1, 32, 32), 10))
    names = ["fc.weight", "layer4.0.bn1.bias", "layer4.1.bn1.bias", "layer1.0.bn1.bias", "bn1.bias"]
    assert [rates[name] for name in names] == [1, 1 / 2, 1 / 2, 1 / 16, 1 / 32]
    rates = learning_rates(build("timm", "test_vit", (1, 32, 32), 10))
    assert [rates[name] for name in ("head.bias", "norm.bias", "blocks.0.norm1.bias", "cls_token")] == [
        1, 1 / 2, 2**-6, 2**-7
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "layers"),
    {"vit_b_32": 14, "swin_v2_t": 10, "convnext_tiny": 10, "efficientnet_b0": 11, "maxvit_t": 6, "vgg11_bn": 0}.items(),
)
def test_blocks_of_torchvision_are_in_order(architecture: str, layers: int) -> None:
    with torch.device("meta"):
        found = [*find_layers(build("torchvision", architecture, (3, 224, 224))).values()]
    assert found == sorted(found)
    assert max(found, default=-1) + 1 == layers


def test_default_weights_come_from_the_cache_and_downloads_are_checked(
    quick: list[str], tmp_path: Path, succeed: Printed, refuse: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shufflenet-00000000.pth"
    torch.save(build("torchvision", SMALL["torchvision"], (3, 28, 28)).state_dict(), source)
    default = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    typed = [*quick, "model=torchvision", f"model.architecture={SMALL['torchvision']}", "model.weights=default"]
    monkeypatch.setattr(default.value, "url", source.as_uri())
    assert 'invalid hash value (expected "00000000"' in refuse(*typed)
    monkeypatch.setattr(default.value, "url", "http://127.0.0.1:9/shufflenet-00000000.pth")
    assert "to read weights from a file instead, set model.weights=FILE" in refuse(*typed)
    source.rename(tmp_path / "cache" / "hub" / "checkpoints" / source.name)
    assert "weights of model.weights" in succeed(*typed, "epochs=1")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("model=torchvision model.architecture=resnet19", r"model\.architecture=resnet19: did you mean 'resnet18'\?"),
        ("model=timm model.architecture=resnet19", r"model\.architecture=resnet19: timm has no such model; timm\.list"),
        ("model=timm model.architecture=vgg11 model.drop_path=0.1", r"model\.drop_path=0\.1: vgg11 has none; set it"),
        ("model=torchvision model.architecture=alexnet", r"model=torchvision alexnet: fails on images \[1, 28, 28\]"),
        ("model=torchvision model.architecture=vit_b_16", r"vit_b_16: .*indivisible by patch size!; set data\.datas"),
        ("model=torchvision model.weights=a.pth", r"model\.weights=a\.pth: there is no such"),
        ("model=torchvision model.weights=a.pth init=b.pth", "init and model.weights both name initial weights"),
        ("model=cnn optimizer.layer_decay=0.5", r"optimizer\.layer_decay=0\.5: the model has no ordered blocks; set"),
    ],
)
def test_refusals_name_the_key(quick: list[str], refuse: Printed, typed: str, message: str) -> None:
    assert re.search(message, refuse(*quick, *typed.split()))


def test_timm_is_an_extra(quick: list[str], refuse: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitmnist.models.pretrained.find_spec", lambda name: None)
    assert "timm is not installed; run pip install 'vitmnist[timm]'" in refuse(*quick, "model=timm")
