"""What augmentation costs: batched on the device, per sample in a DataLoader with torchvision, and with kornia.

    python benchmarks/augment.py --output benchmarks/results/augment-cpu.md

The first table is the preset `cifar` on random images of 32×32×3 bytes: in each round every candidate loads, augments
and normalises one shuffled epoch. The second applies single operations to batches that are in memory, as floats. A
ratio divides a candidate's time by that of this project in the same round. kornia is left out if it is not installed:
`pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from rounds import command_line, main, ratios, report, seconds_of, table, take_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitmnist import Preprocess, make_loader
from vitmnist.config.compose import compose
from vitmnist.data.augment import OPERATIONS, augment_keys, build_augment
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.allocator import keep_memory
from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment

OURS = "`data/augment=cifar` on the batches of `ram`"
SIDE, BATCH_SIZE, BATCHES = 32, 512, 20
SCALE, RATIO = (0.02, 0.2), (0.3, 3.3)  # of the preset's random_erasing

Candidates = dict[str, Callable[[int], object]]


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """The preset with torchvision's transforms, sample by sample."""

    def __init__(self, data: TensorSet, preprocess: Preprocess) -> None:
        from torchvision.transforms import v2

        mean, std = (part.flatten().tolist() for part in (preprocess.mean, preprocess.std))
        self.data = data
        self.transform = v2.Compose(
            [
                v2.RandomCrop(SIDE, padding=4),
                v2.RandomHorizontalFlip(),
                v2.RandomErasing(0.5, SCALE, RATIO),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(mean, std),
            ]
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.data.images[index]), self.data.labels[index]


def kornia_operations() -> dict[str, nn.Module]:
    """kornia's counterparts of our operations, on floats of 0…1, with the same parameters."""
    import kornia.augmentation as K

    return {
        "shift": K.RandomCrop((SIDE, SIDE), padding=4),
        "horizontal_flip": K.RandomHorizontalFlip(0.5),
        "random_erasing": K.RandomErasing(SCALE, RATIO, p=0.5),
        "random_resized_crop": K.RandomResizedCrop((SIDE, SIDE), (0.08, 1.0), (0.75, 1.3333), align_corners=False),
        "color_jitter": K.ColorJitter(0.2, 0.2, 0.2, 0.1),
    }


def epochs(data: TensorSet, device: torch.device) -> Candidates:
    """The preset: load, augment and normalise an epoch."""
    preprocess = Preprocess(data, build_augment(compose(["data/augment=cifar"]).data.augment))
    per_sample = PerSample(data, preprocess)
    preprocess.to(device)
    loader = make_loader("ram", data, batch_size=BATCH_SIZE, device=device, seed=0)

    def ours(number: int) -> None:
        for (images, _), keys in zip(loader.epoch(number), preprocess.keys(loader.sampler, number), strict=True):
            preprocess(images, keys)

    workers = DataLoader(per_sample, BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)

    def torchvision(number: int) -> None:
        for images, _ in workers:
            images.to(device)

    found: Candidates = {OURS: ours, "torchvision v2 per sample, DataLoader with 2 workers": torchvision}
    if find_spec("kornia"):
        chain = list(kornia_operations().values())[:3]

        def kornia(number: int) -> None:
            for images, _ in loader.epoch(number):
                floats = images.float() / 255
                for operation in chain:
                    floats = operation(floats)
                floats.sub_(preprocess.mean).div_(preprocess.std)

        found["kornia on the batches of `ram`"] = kornia
    return found


def operations(data: TensorSet, device: torch.device) -> dict[str, Candidates]:
    """Single operations, ours first."""
    options: dict[str, dict[str, Any]] = {
        "shift": {"pixels": 4},
        "random_erasing": {"scale": list(SCALE), "ratio": list(RATIO)},
        "color_jitter": {"hue": 0.1},
    }
    batches = (data.images.to(device).float() / 255).split(BATCH_SIZE)
    sampler = EpochSampler(len(data), BATCH_SIZE, 0)
    found: dict[str, Candidates] = {}
    for name, theirs in kornia_operations().items():
        operation = OPERATIONS.build(OPERATIONS.complete({"name": name, **options.get(name, {})})).to(device)

        def ours(number: int, operation: nn.Module = operation) -> None:
            for images, keys in zip(batches, augment_keys(sampler, number, device).split(BATCH_SIZE), strict=True):
                operation(images, keys)

        def kornia(number: int, theirs: nn.Module = theirs) -> None:
            for images in batches:
                theirs(images)

        found[name] = {"ours": ours, "kornia": kornia}
    return found


def measure(candidates: Candidates, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds per batch in each round."""

    def turn(candidate: Callable[[int], object], number: int) -> float:
        return seconds_of(lambda: candidate(number), device) * 1000 / BATCHES

    return take_turns({name: partial(turn, candidate) for name, candidate in candidates.items()}, rounds)


def compare(arguments: argparse.Namespace) -> str:
    """Measure everything; the report."""
    device, rounds = choose_device(arguments.device), arguments.rounds
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH_SIZE * BATCHES, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    data = TensorSet(images, torch.zeros(len(images), dtype=torch.int64))
    with keep_memory() if device.type == "cpu" else nullcontext():  # as in training
        times = measure(epochs(data, device), rounds, device)
        rows = [[name, f"{median(values):.2f}", ratios(values, times[OURS])] for name, values in times.items()]
        tables = [table(["preset `cifar`", "ms per batch", "time over ours"], rows)]
        if find_spec("kornia"):
            rows = []
            for name, candidates in operations(data, device).items():
                ours, kornia = measure(candidates, rounds, device).values()
                rows.append([f"`{name}`", f"{median(ours):.2f}", f"{median(kornia):.2f}", ratios(kornia, ours)])
            tables.append(table(["operation", "ours, ms", "kornia, ms", "kornia over ours"], rows))
    method = f"Batches of {BATCH_SIZE} images of {SIDE}×{SIDE}×3, {rounds} rounds; ratios: median and range."
    return report("Augmentation", describe_environment(device), method, *tables)


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--device", default="cpu")
    main(parser, compare)
