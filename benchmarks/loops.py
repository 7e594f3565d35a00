"""Training loops that this project is compared with: written by hand, the articles', and Lightning's."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable

import article
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from vitmnist.data.datasets import Split
from vitmnist.data.preprocess import Preprocess
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.runtime.timer import synchronize

LR = 0.003

Epoch = Callable[[int], tuple[float, float]]
"""Trains for an epoch of a given number; returns its seconds and the percentage spent waiting for data (or NaN)."""


def new_model(split: Split, device: torch.device, kind: type[ViT] = ViT) -> torch.nn.Module:
    """The articles' ViT, always with the same weights."""
    torch.manual_seed(42)
    _, channels, height, width = split.images.shape
    return kind(ViTOptions(), (channels, height, width), len(split.classes)).to(device)


def timed(train: Callable[[], object], device: torch.device) -> Epoch:
    """Time a function that trains for one epoch, from an idle device to an idle device."""

    def epoch(number: int) -> tuple[float, float]:
        synchronize(device)
        start = time.perf_counter()
        train()
        synchronize(device)
        return time.perf_counter() - start, float("nan")

    return epoch


def bare_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """What one writes by hand for a normalised float32 set on the device."""
    model = new_model(split, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    images, labels = Preprocess(split)(split.images).to(device), split.labels.to(device)

    def train() -> None:
        total = torch.zeros((), device=device)
        permutation = torch.randperm(len(images), device=device)
        for start in range(0, len(images), batch_size):
            indices = permutation[start : start + batch_size]
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()

    return timed(train, device)


def article_loop(
    split: Split, batch_size: int, device: torch.device, way: article.Way, kind: type[ViT] = article.ArticleViT
) -> Epoch:
    """The articles' loop over one of their ways of loading."""
    model = new_model(split, device, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = way(split, batch_size, device)
    return timed(lambda: article.train(model, optimizer, batches, device), device)


def lightning_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """Lightning's `Trainer` over a `DataLoader(TensorDataset)`, without logger, checkpoints and progress bar."""
    import lightning  # from the `bench` extra

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    dataset = TensorDataset(Preprocess(split)(split.images), split.labels)
    loader = DataLoader(dataset, batch_size, shuffle=True, pin_memory=device.type == "cuda")

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # if it is not installed
        seconds = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.model = new_model(split, device)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), lr=LR)

        def on_train_epoch_start(self) -> None:
            synchronize(device)
            self.start = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            synchronize(device)
            self.seconds = time.perf_counter() - self.start

    module = Module()
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def epoch(number: int) -> tuple[float, float]:
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, loader)
        return module.seconds, float("nan")

    return epoch
