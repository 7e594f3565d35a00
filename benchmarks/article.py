"""The articles' training: their model (all tokens in all blocks), their three ways of loading, and their loop."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from loops import LR, Epoch, as_timed_epoch, build_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Split
from vitmnist.loaders.workers import SplitSamples
from vitmnist.models.vit import ViT

SYNCHRONISE_EVERY = 100
"""The number of steps between two prints of loss and accuracy in the articles."""

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Returns the batches of an epoch: normalised images and labels."""

Way = Callable[[Split, int, torch.device], Batches]
"""A way of loading, given the batch size and the device."""


class ArticleViT(ViT):
    """A `ViT` with the same weights and logits that computes all tokens in the last block."""

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=self.patch, q=self.patch)
        class_token = self.class_token.expand(len(images), -1, -1)
        tokens = torch.cat((class_token, self.embed(patches)), dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(tokens[:, 0])
        return logits


def disk(split: Split, batch_size: int, device: torch.device) -> Batches:
    """One sample at a time: decode, convert to a tensor, normalise."""
    loader = DataLoader(SplitSamples(split), batch_size, shuffle=True, pin_memory=device.type == "cuda")
    return lambda: loader


def ram(split: Split, batch_size: int, device: torch.device) -> Batches:
    """Normalised tensors in memory; the articles do not normalise them."""
    samples = TensorDataset(Preprocess(split)(split.images), split.labels)
    loader = DataLoader(samples, batch_size, shuffle=True, pin_memory=device.type == "cuda")
    return lambda: loader


def slices(split: Split, batch_size: int, device: torch.device) -> Batches:
    """Contiguous slices of a dataset on the device, in random order."""
    images, labels = Preprocess(split)(split.images).to(device), split.labels.to(device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for block in torch.randperm(-(-len(split) // batch_size)).tolist():
            rows = slice(block * batch_size, (block + 1) * batch_size)
            yield images[rows], labels[rows]

    return batches


WAYS = {"disk": disk, "RAM": ram, "slices": slices}


def build_article_loop(way: Way, kind: type[ViT], split: Split, batch_size: int, device: torch.device) -> Epoch:
    """Build the articles' loop over one of their ways of loading."""
    model = build_model(split, device, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = way(split, batch_size, device)

    def train() -> None:
        for number, batch in enumerate(batches(), start=1):
            images, labels = (part.to(device) for part in batch)
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy = (logits.argmax(dim=1) == labels).float().mean()
            if number % SYNCHRONISE_EVERY == 0:
                loss.item(), accuracy.item()

    return as_timed_epoch(train, device)
