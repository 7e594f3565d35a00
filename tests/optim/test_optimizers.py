"""AdamW decays only the weights of linear layers; Adam and SGD equal torch's."""

import pytest
import torch
from torch import nn

from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.optimizers import OPTIMIZERS

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.01, "momentum": 0.0, "nesterov": False, "weight_decay": 0.1}


def make_vit() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTOptions(patch_size=14, dim=16, depth=2, heads=2, mlp_dim=16), (1, 28, 28), 10)
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)  # Weight decay would not change zeros.
    return model


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_decays_only_the_weights_of_linear_layers(fused: bool) -> None:
    model = make_vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS.build({"name": "adamw", **ADAM}, model, fused)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    linear = ("embed", "attention.1.to_qkv", "attention.1.to_out", "mlp.1", "mlp.3", "head.0", "head.2")
    assert decayed == {name for name in before if name.endswith(tuple(f"{layer}.weight" for layer in linear))}
    for name in decayed:
        torch.testing.assert_close(model.state_dict()[name], before[name] * (1 - 0.01 * 0.1))


@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({"name": "adam", **ADAM}, lambda model: torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)),
        ({"name": "sgd", **SGD}, lambda model: torch.optim.SGD(model.parameters(), 0.01, weight_decay=0.1)),
    ],
    ids=["adam", "sgd"],
)
def test_adam_and_sgd_equal_those_of_torch(values: dict, reference: object) -> None:
    weights = []
    for build in (lambda model: OPTIMIZERS.build(values, model, False), reference):
        model = make_vit()
        optimizer = build(model)
        images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.arange(3)).backward()
            optimizer.step()
        weights.append(model.state_dict())
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
