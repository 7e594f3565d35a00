"""Options reach torch; AdamW, and SGD without `decay_norms`, decay only the weights of linear layers."""

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


def test_every_option_of_adam_reaches_torch() -> None:
    options = {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.2}
    for name in ("adam", "adamw"):
        group = OPTIMIZERS.build({"name": name, **options}, make_vit(), False).param_groups[0]
        assert (group["lr"], *group["betas"], group["eps"], group["weight_decay"]) == tuple(options.values())
