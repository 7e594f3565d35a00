"""The ViT computes the articles' formulas. A model with a wrong output is refused, and its bugs are shown."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import AddMembers, Printed, Train
from vitmnist.losses import LOSSES
from vitmnist.losses.cross_entropy import CrossEntropyOptions
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.registry import Member


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def reference_vit(model: ViT, options: ViTOptions, images: Tensor) -> Tensor:
    """Compute the articles' forward pass without einops, nn modules or fused attention."""
    w = dict(model.state_dict())
    p, heads, width = options.patch_size, options.heads, options.head_dim
    batch, _, height, _ = images.shape
    tokens = []
    for row in range(0, height, p):
        for column in range(0, height, p):
            patch = images[:, :, row : row + p, column : column + p].permute(0, 2, 3, 1).reshape(batch, -1)
            tokens.append(patch @ w["embed.weight"].T + w["embed.bias"])
    x = torch.stack([w["class_token"][0].expand(batch, -1), *tokens], dim=1) + w["positions"]
    for block in range(options.depth):
        name = f"blocks.{block}"
        normed = layer_norm(x, w[f"{name}.attention.0.weight"], w[f"{name}.attention.0.bias"])
        q, k, v = (normed @ w[f"{name}.attention.1.to_qkv.weight"].T).chunk(3, dim=-1)
        outputs = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            logits = q[..., part] @ k[..., part].transpose(1, 2) * options.dim**-0.5
            weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
            outputs.append(weights @ v[..., part])
        out = torch.cat(outputs, -1) @ w[f"{name}.attention.1.to_out.weight"].T
        x = x + out + w[f"{name}.attention.1.to_out.bias"]
        normed = layer_norm(x, w[f"{name}.mlp.0.weight"], w[f"{name}.mlp.0.bias"])
        hidden = gelu(normed @ w[f"{name}.mlp.1.weight"].T + w[f"{name}.mlp.1.bias"])
        x = x + hidden @ w[f"{name}.mlp.3.weight"].T + w[f"{name}.mlp.3.bias"]
    hidden = gelu(x[:, 0] @ w["head.0.weight"].T + w["head.0.bias"])
    return hidden @ w["head.2.weight"].T + w["head.2.bias"]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 14, 14), (1, 63, 63)], ids=["17 tokens", "5 tokens", "82 tokens"])
def test_vit_equals_the_formulas_of_the_articles(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    options = ViTOptions()
    model = ViT(options, shape, num_classes=10).double()
    images = torch.randn(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference_vit(model, options, images), rtol=1e-10, atol=1e-10)
    if shape == (1, 28, 28):
        assert sum(parameter.numel() for parameter in model.parameters()) == 213_642


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_model_has_an_output_for_each_class(
    outputs: int, quick: list[str], refuse: Printed, add_members: AddMembers
) -> None:
    """With more outputs, the model would train and predict classes that do not exist."""
    add_members(MODELS, cnn=Member(CNNOptions, lambda options, shape, num_classes: CNN(options, shape, outputs)))
    printed = refuse(*quick, "model=cnn")
    assert f"model=cnn: it returned [2, {outputs}] for 2 images of 10 classes; it must return logits [2, 10]" in printed


class Wrapped(nn.Module):
    """A model, and a function of its logits."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(self.model(images))


@pytest.mark.parametrize(
    ("build", "sweep"),
    [
        (lambda options, shape, num_classes: options.missing, ()),
        (lambda *args: Wrapped(CNN(*args), lambda logits: logits.missing), ()),
        (lambda options, shape, num_classes: options.missing, ("-m", "seed=1")),
    ],
    ids=["constructor", "forward", "sweep"],
)
def test_a_bug_in_a_model_is_shown_with_its_traceback(
    build: object, sweep: tuple[str, ...], quick: list[str], train_here: Train, add_members: AddMembers
) -> None:
    add_members(MODELS, cnn=Member(CNNOptions, build))
    ended = train_here(*sweep, *quick)
    assert ended.returncode == 1
    for part in ("Traceback", "test_models.py", "has no attribute 'missing'"):
        assert part in ended.stdout + ended.stderr


class Put(torch.autograd.Function):
    """The identity, with an operation in its backward pass that has no deterministic implementation."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.put(torch.tensor([0]), torch.ones(1))


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "data/loader=auto"])
def test_an_operation_without_a_deterministic_form_ends_the_run_with_the_key(
    where: str, quick: list[str], refuse: Printed, add_members: AddMembers
) -> None:
    def put(logits: Tensor, *targets: Tensor) -> Tensor:
        return logits.put(torch.tensor([0]), torch.ones(1))

    if where == "loss":
        add_members(LOSSES, cross_entropy=Member(CrossEntropyOptions, lambda *args: put))
    else:
        model = Member(CNNOptions, lambda *args: Wrapped(CNN(*args), put if where == "forward" else Put.apply))
        add_members(MODELS, cnn=model)
    typed = ["data/loader=auto", "data.loader.seconds=0.1"] if "auto" in where else []
    printed = refuse(*quick, *typed, "trainer.deterministic=true")
    torch.use_deterministic_algorithms(False)
    assert printed.count("put_ does not have a deterministic implementation, so a resumed run could differ") == 1
    assert printed.endswith("use another operation, or set trainer.deterministic=false\n")
