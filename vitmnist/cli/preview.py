"""Draw what an augmentation does: a row per training image, with the original and its versions in seven epochs.

vitmnist preview data/augment=crops data/dataset=image_folder data.dataset.path=pictures
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from PIL import Image

from vitmnist.augment.preprocess import Preprocess, build_augment, input_size
from vitmnist.cli.arguments import searchpath
from vitmnist.cli.command import command
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.data.datasets.base import Split, build_dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.runtime.files import display_path
from vitmnist.tracking.images import GRID_COLUMNS, grid, model_inputs
from vitmnist.training.setup import check_config

IMAGES = 8
LEAST_SIDE = 96  # pixels; smaller images are enlarged


def draw(train: Split, preprocess: Preprocess, seed: int) -> Image.Image:
    """The first images of a split, and next to each what the model sees of it in epochs 0 to 6.

    These are the images of a run with this seed, except that mixing takes partners from among the images shown.
    """
    sampler = EpochSampler(len(train), min(IMAGES, len(train)), seed, "none")
    shown = torch.arange(sampler.batch_size)
    keys = [None, *(next(preprocess.keys(sampler, epoch)) for epoch in range(GRID_COLUMNS - 1))]
    versions = torch.stack([model_inputs(train, shown, preprocess, key) for key in keys], dim=1)
    enlarged = max(1, -(-LEAST_SIDE // max(versions.shape[-2:])))
    pixels = versions.flatten(0, 1).repeat_interleave(enlarged, dim=2).repeat_interleave(enlarged, dim=3)
    return grid(pixels)


def preview(overrides: list[str], output: Path) -> None:
    """Write the preview of a configuration to a PNG file; raises what the configuration and its data raise."""
    config = validate(Config, compose(overrides))
    check_config(config)
    train = build_dataset(config.data.dataset, config.data.root).train
    augment = build_augment(config.data.augment)
    input_size(augment, *train.images.shape[-2:])
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(train, Preprocess(train, augment), config.seed).save(output, "PNG")


def _parse(parser: ArgumentParser) -> Namespace:
    parser.add_argument("overrides", nargs="*", help="as for training, such as data/augment=cifar")
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="more YAML files, as for training")
    parser.add_argument("--output", type=Path, metavar="PNG", default=Path("outputs/preview.png"))
    return parser.parse_intermixed_args()


@command(_parse)
def main(options: Namespace) -> None:
    preview([*options.overrides, *searchpath(options.config_dir)], options.output)
    print(display_path(options.output))
