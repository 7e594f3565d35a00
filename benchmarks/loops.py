"""Training loops, timed by the epoch: the loop of this project, a hand-written loop, and Lightning's."""

import logging
import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from rounds import measure_seconds
from torch.utils.data import DataLoader, TensorDataset

from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import Batches, Loader
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.timer import synchronize
from vitmnist.trainer import Trainer
from vitmnist.training.loop import train_epoch
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep

LR = 0.003

Epoch = Callable[[int], tuple[float, float]]
"""Takes the number of an epoch, trains, and returns the seconds and the percentage of waiting for data (or NaN)."""


def build_model(split: Split, device: torch.device, kind: type[ViT] = ViT) -> torch.nn.Module:
    """Build the articles' ViT, always with the same weights."""
    torch.manual_seed(42)
    _, channels, height, width = split.images.shape
    return kind(ViTOptions(), (channels, height, width), len(split.classes)).to(device)


def build_run(overrides: list[str], stack: ExitStack) -> tuple[Dataset, TrainStep, Loader, Loader]:
    """Build the dataset, step and loaders of a run without records. `stack` closes the loaders."""
    trainer = Trainer(validate(Config, compose(overrides)), Path(), overrides, StopSignal())
    dataset, sampler = trainer.build_data()
    step = trainer.build_step(dataset.train, sampler, trainer.load_initial_weights())
    train_loader, eval_loader, _ = stack.enter_context(trainer.build_loaders(dataset, sampler, step))
    step.compile_or_capture(train_loader)
    trainer.distribute(step)
    return dataset, step, train_loader, eval_loader


class ResidentBatch(Loader):
    """Repeats a batch that is already on the device, so that the model never waits for data."""

    def __init__(self, split: Split, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        images, labels = split.read(slice(0, min(sampler.batch_size, sampler.size)))
        self.images, self.labels = images.to(device), labels.to(device)

    def batches(self, epoch: int, start: int) -> Batches:
        for batch in range(start, len(self)):
            size = self.sampler.num_images(batch)
            yield self.images[:size], self.labels[:size]


def build_our_loop(overrides: list[str], stack: ExitStack, is_resident: bool = False) -> tuple[Epoch, str]:
    """Build the training loop of this project, and describe how its step is computed.

    Args:
        is_resident: train on one batch that stays on the device, over and over.
    """
    dataset, step, loader, _ = build_run(overrides, stack)
    device = step.device
    if is_resident:
        loader = ResidentBatch(dataset.train, loader.sampler, device)

    def epoch(number: int) -> tuple[float, float]:
        metrics = train_epoch(step, loader, EpochProgress(number, loader.sampler, device))
        return metrics["train_s"], metrics["data_wait_pct"]

    remark, compile_s = step.runner.options.describe().replace("\n", "; "), step.runner.compile_s
    return epoch, remark + (f"; compilation took {compile_s:.1f} s" if compile_s else "")


def as_timed_epoch(train: Callable[[], object], device: torch.device) -> Epoch:
    """Turn a function that trains for an epoch into an `Epoch`."""
    return lambda number: (measure_seconds(train, device), math.nan)


def build_hand_written_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """Build the usual hand-written loop over a normalised float32 dataset on the device."""
    model = build_model(split, device)
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

    return as_timed_epoch(train, device)


def build_lightning_loop(split: Split, batch_size: int, device: torch.device) -> Epoch:
    """Build Lightning's `Trainer` over a `DataLoader(TensorDataset)`, without logger, checkpoints and progress bar."""
    import lightning  # from the `bench` extra

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    dataset = TensorDataset(Preprocess(split)(split.images), split.labels)
    loader = DataLoader(dataset, batch_size, shuffle=True, pin_memory=device.type == "cuda")

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # if Lightning is not installed
        seconds = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(split, device)

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
        return module.seconds, math.nan

    return epoch
