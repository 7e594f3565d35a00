"""The ViT computes the articles' formulas."""

import math

import pytest
import torch
from torch import Tensor

from vitmnist.models.vit import ViT, ViTOptions


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
