"""Draws images for loggers and `evaluate --grid`: the model's input, and its worst mistakes.

Pillow draws them, because importing matplotlib takes longer than training on a small set.
"""

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import printable
from vitmnist.training.loop import Predictions

BATCH_IMAGES = 64
"""The number of images of a training batch that are drawn."""
MISTAKES = 16
"""The number of mistakes that are drawn."""
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 50, 10
"""The sizes of the image of a mistake, in pixels."""
CAPTION_LENGTH = 24
"""The number of characters that fit in the width of a tile."""


def draw_epoch_images(
    dataset: Dataset, sampler: EpochSampler, preprocess: Preprocess, predictions: Predictions, epoch: int
) -> dict[str, Image.Image]:
    """Draw the model's input in an epoch, and its worst mistakes after the epoch if it made any; returned by name."""
    images = {"training_batch": draw_training_batch(dataset.train, sampler, preprocess, epoch)}
    if mistakes := draw_worst_mistakes(dataset.evaluation, predictions):
        images["worst_mistakes"] = mistakes
    return images


def draw_training_batch(train: Split, sampler: EpochSampler, preprocess: Preprocess, epoch: int) -> Image.Image:
    """Draw the first images of an epoch as the model saw them, augmented.

    The images are read by their indices, so that the iteration of the loader is not disturbed.
    """
    size = sampler.rank_batch_size if preprocess.mixes else min(BATCH_IMAGES, sampler.rank_batch_size)
    indices = sampler.indices(epoch)[:size]
    keys = next(preprocess.keys(sampler, epoch))
    images = train.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        if preprocess.mixes and keys is not None:
            inputs, _ = preprocess.mix_batch(images, train.labels[indices].to(images.device), keys)
        else:
            inputs = preprocess(images, None if keys is None else keys[:size])
        pixels = (inputs * preprocess.std + preprocess.mean).clamp(0, 1).mul(255).round().byte().cpu()
    grid: Image.Image = to_pil_image(make_grid(_visible_channels(pixels[:BATCH_IMAGES])))
    return grid


def draw_worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """Draw the misclassified images with the highest confidence, with captions; None if there are no mistakes."""
    tiles = []
    for index in predictions.mistakes()[:MISTAKES]:
        tile = Image.new("RGB", (TILE_WIDTH, CAPTION_HEIGHT + TILE_WIDTH), "white")
        ImageDraw.Draw(tile).text((0, 0), format_caption(split, predictions, index), "black")
        image = to_pil_image(_visible_channels(split.images[index]))
        enlarged = ImageOps.contain(image, (TILE_WIDTH, TILE_WIDTH), Image.Resampling.NEAREST)
        tile.paste(enlarged, (0, CAPTION_HEIGHT))
        tiles.append(pil_to_tensor(tile))
    return to_pil_image(make_grid(tiles, nrow=4, padding=GAP, pad_value=255)) if tiles else None


def format_caption(split: Split, predictions: Predictions, index: int) -> str:
    """Format the file name or index, the true class, and the predicted class with its probability, in three lines."""
    name = str(split.name(index))[-CAPTION_LENGTH:]  # File names differ at their ends.
    actual = split.classes[int(split.labels[index])]
    predicted = split.classes[int(predictions.labels[index])]
    confidence = 100 * float(predictions.confidence[index])
    lines = (name, f"true: {actual}", f"{confidence:.1f}% {predicted}")
    return "\n".join(printable(line)[:CAPTION_LENGTH] for line in lines)


def _visible_channels(images: Tensor) -> Tensor:
    """The first three channels of images `[…, C, H, W]`, or the first one if there are fewer."""
    return images[..., :3, :, :] if images.shape[-3] >= 3 else images[..., :1, :, :]
