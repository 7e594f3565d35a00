"""AdamW decays only the weights of linear layers."""

import pytest
import torch

from tests.training.test_step import OPTIMIZERS_UNDER_TEST, make_vit
from vitmnist.optim.optimizers import OPTIMIZERS


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_decays_only_the_weights_of_linear_layers(fused: bool) -> None:
    model, options = make_vit(), OPTIMIZERS_UNDER_TEST["adamw"]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)  # Weight decay would not change zeros.
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS.build({"name": "adamw", **options}, model, fused)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    linear = ("embed", "attention.1.to_qkv", "attention.1.to_out", "mlp.1", "mlp.3", "head.0", "head.2")
    assert decayed == {name for name in before if name.endswith(tuple(f"{layer}.weight" for layer in linear))}
    kept = 1 - options["lr"] * options["weight_decay"]
    for name in decayed:
        torch.testing.assert_close(model.state_dict()[name], kept * before[name])
