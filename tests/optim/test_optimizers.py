"""AdamW decays only the weights of linear layers, and so does SGD without `decay_norms`."""

import pytest
import torch

from tests.support.steps import OPTIMIZERS_UNDER_TEST, make_vit
from vitmnist.optim.optimizers import OPTIMIZERS


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [("adamw", OPTIMIZERS_UNDER_TEST["adamw"]), ("sgd", {"lr": 0.5, "weight_decay": 0.1, "decay_norms": False})],
)
def test_only_the_weights_of_linear_layers_decay(name: str, options: dict, fused: bool) -> None:
    model = make_vit()
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)  # Weight decay would not change zeros.
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS.build({"name": name, **options}, model, fused)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    linear = ("embed", "attention.1.to_qkv", "attention.1.to_out", "mlp.1", "mlp.3", "head.0", "head.2")
    assert decayed == {name for name in before if name.endswith(tuple(f"{layer}.weight" for layer in linear))}
    kept = 1 - options["lr"] * options["weight_decay"]
    for weight in decayed:
        torch.testing.assert_close(model.state_dict()[weight], kept * before[weight])
