"""AdamW decays only the weights of linear layers."""

import pytest
import torch

from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.optimizers import OPTIMIZERS

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


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
