"""Trains on JPEG files, and waits for them most of the time.

    vitmnist diagnose --steps 50 --stop docs/examples/photos.py

The first start draws 2,000 pictures of 500×375 pixels, about 70 MB, into `photos`, a new folder in the current one.
Later starts use them; `rm -r photos` removes them.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Resize, ToTensor

PICTURES = 2000


def draw(number, corners):
    """Polygons on a gradient, with noise: JPEG files of it are about as large as those of photographs."""
    random = np.random.default_rng(number)
    colours = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize((500, 375), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    for x, y, size, angle, *colour in random.integers(0, 256, (12, 7)).tolist():
        pen.regular_polygon((2 * x, 1.5 * y, 10 + size // 3), corners, rotation=angle, fill=tuple(colour))
    noise = random.integers(-12, 13, (375, 500, 1), dtype=np.int16)
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


if not Path("photos").exists():
    print(f"drawing {PICTURES:,} pictures into the folder photos")
    unfinished = Path("photos.unfinished")
    for number in range(PICTURES):
        corners = 3 + number % 4
        folder = unfinished / f"{corners} corners"
        folder.mkdir(parents=True, exist_ok=True)
        draw(number, corners).save(folder / f"{number}.jpg")
    unfinished.rename("photos")

photos = ImageFolder("photos", Compose([Resize((64, 64)), ToTensor()]))
loader = DataLoader(photos, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 31 * 31, 4))
optimizer = torch.optim.Adam(model.parameters())


def step(batch):
    images, labels = batch
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for _ in range(3):
    for batch in loader:
        step(batch)
