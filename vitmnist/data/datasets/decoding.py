"""Decodes encoded images once, on all cores, into a cache, and makes a dataset of them."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from vitmnist.config.validation import config_field, read_size
from vitmnist.data.channel_statistics import compute_mean_and_std, compute_statistics, sum_channels
from vitmnist.data.datasets.base import Dataset, ImageFiles, SizeOptions, Split
from vitmnist.data.image_listing import ImageListing, sort_by_hash
from vitmnist.data.images import ColorMode, ImageReader, ReadImage, ResizeMode, to_tensor
from vitmnist.errors import ConfigError, DataError, UserError, join_names
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import available_cores, create_decoder_context
from vitmnist.store.cache_file import open_or_write_cache
from vitmnist.store.rows import as_contiguous_rows, is_large

log = logging.getLogger(__name__)

CACHE_VERSION = 11
"""The version of the decoded pixels and of their metadata. Images in a cache of another version are decoded again."""
BLOCK_SIZE = 8
"""Number of images that a thread reads at a time. With single images, each would cost a thread switch."""
MIN_STD = 8
"""A lower standard deviation of the pixels causes a warning. 12-bit data in 16-bit files is always below it."""


@dataclass
class DecodingOptions(SizeOptions):
    """How encoded images become pixels. A subclass lists the images."""

    path: str = config_field(may_change_on_resume=True)  # Checksums tell whether the images are the same.
    size: Any = config_field(28, at_least=1)
    mode: ColorMode = ColorMode.auto
    resize: ResizeMode = ResizeMode.stretch
    test_share: float = config_field(0.2, at_least=0, below=1, image_selection="splits", keeps_all=0)
    skip_unreadable: bool = False
    draft: bool = True
    max_16_bit: int = config_field(65_535, at_least=1, at_most=65_535)
    # The bounds admit any float32.
    range_32_bit: tuple[float, float] | None = config_field(None, is_range=True, at_least=-3.5e38, at_most=3.5e38)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1 if self.mode == ColorMode.grey else 3), *read_size("data.dataset.size", self.size)

    @property
    def reader(self) -> ImageReader:
        values = self.range_32_bit and (self.range_32_bit[0], self.range_32_bit[1])  # OmegaConf turned it into a list.
        return ImageReader(self.shape[1:], self.mode, self.resize, self.draft, self.max_16_bit, values)

    def resolve_auto(self) -> dict[str, Any]:
        """Return the value for `mode: auto`: rgb if any of a hundred images of the splits has colours, else grey."""
        if self.mode != ColorMode.auto:
            return {}
        try:
            listing = self.list_images()
        except (UserError, OSError):
            return {"mode": "grey"}  # Building the dataset raises the error again.
        for name in sort_by_hash(chain.from_iterable(listing.splits.values()))[:100]:
            with suppress(DataError):  # It is reported when all images are decoded.
                pixels = np.asarray(listing.read(listing.folder / name))
                if (pixels != pixels[:, :, :1]).any():
                    return {"mode": "rgb"}
        return {"mode": "grey"}

    def list_images(self) -> ImageListing:
        """List the images of each split, with remarks on what is left out; raises `ConfigError` or `DataError`."""
        raise NotImplementedError


def decode_dataset(options: DecodingOptions, root: Path) -> Dataset:
    """Decode the images of all splits once into `root`, and make a dataset of them.

    Raises:
        ConfigError: there is no such folder, or a size is larger than its split.
        DataError: there are too few classes or images, or images are unreadable and `skip_unreadable` is false.
        OutOfSpaceError: the disk of `root` has too little room for the decoded images.
    """
    if options.range_32_bit and options.range_32_bit[0] == options.range_32_bit[1]:
        raise ConfigError(f"data.dataset.range_32_bit={[*options.range_32_bit]}: black and white must differ")
    options = replace(options, **options.resolve_auto())
    listing = options.list_images()
    for remark in listing.remarks:
        log.log(*remark)
    listing = _sort_and_divide(listing, options.test_share)
    # Refuse classes and sizes before anything is decoded.
    classes = listing.find_classes()
    options.select_rows({split: len(images) for split, images in listing.splits.items()})
    new_metadata: dict[str, Any] = {}
    (images,), metadata = open_or_write_cache(
        root / "vitmnist-cache",
        _fingerprint(listing, options),
        sum(map(len, listing.splits.values())),
        partial(_decode, listing, options, new_metadata),
        new_metadata,
        names=("images",),
    )
    if (deviation := 255 * max(metadata["std"])) < MIN_STD:
        log.warning(
            "%s: the pixels hardly differ, their standard deviation is %.1f of 255; set data.dataset.max_16_bit=4095 "
            "for 16-bit files of 12-bit cameras, or data.dataset.range_32_bit=[BLACK,WHITE] for int32 and float pixels",
            listing.folder,
            deviation,
        )
    if unreadable := metadata["unreadable"]:
        if not options.skip_unreadable:
            advice = "repair or remove them, or set data.dataset.skip_unreadable=true to leave them out"
            raise _make_unreadable_error(unreadable, listing, advice)
        listing = _drop_unreadable(listing, unreadable, classes)
    return Dataset(
        listing.folder.resolve().name,
        **_make_splits(listing, options, images, metadata),
        skipped=len(unreadable),
        folds=listing.folds,
    )


def _sort_and_divide(listing: ImageListing, test_share: float) -> ImageListing:
    """Sort the images of each split by a hash of their names; the order mixes the classes, and stays if some are added.

    If only a training split exists, the first `test_share` of each class become the test split, and at least one image
    stays for training. Images with folds are not divided: those of one fold, such as of a patient, belong together.
    """
    splits = {split: {name: images[name] for name in sort_by_hash(images)} for split, images in listing.splits.items()}
    if len(splits) == 1 and test_share and not listing.folds:
        train, splits = splits["train"], {"train": {}, "test": {}}
        counts = Counter(train.values())
        remaining = {label: min(round(count * test_share), count - 1) for label, count in counts.items()}
        for name, label in train.items():
            splits["test" if remaining[label] > 0 else "train"][name] = label
            remaining[label] -= 1
    return replace(listing, splits=splits)


def _make_unreadable_error(unreadable: Mapping[str, str], listing: ImageListing, advice: str) -> DataError:
    shown, total = [*unreadable.values()][:5], sum(map(len, listing.splits.values()))
    return DataError("\n".join([f"{len(unreadable)} of {total} images cannot be read, such as:", *shown, advice]))


def _drop_unreadable(listing: ImageListing, unreadable: Mapping[str, str], classes: Sequence[str]) -> ImageListing:
    """Return the readable images, and log which images and classes are left out."""
    splits = {
        split: {name: label for name, label in images.items() if name not in unreadable}
        for split, images in listing.splits.items()
    }
    readable = replace(listing, splits=splits)
    messages = join_names(unreadable.values())
    log.warning("%s: %d images cannot be read and are left out: %s", listing.folder, len(unreadable), messages)
    if lost := sorted(set(classes).difference(readable.find_classes())):
        log.warning("%s: classes without readable images are left out: %s", listing.folder, join_names(lost))
    return readable


def _make_splits(
    listing: ImageListing, options: DecodingOptions, images: Tensor, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the splits, by name, from the pixels of all readable images, `[N, C, H, W]` or `[N, H, W, C]`."""
    folder, classes = listing.folder, listing.find_classes()
    sizes = {split: len(names) for split, names in listing.splits.items()}
    shown = " and ".join(f"{size} {split}" for split, size in sizes.items())
    mode = "grey; rgb keeps colours" if options.mode == ColorMode.grey else "rgb"
    message = "%s: %s images of %d classes: %s (data.dataset.mode=%s)"
    log.info(message, folder, shown, len(classes), join_names(classes), mode)
    if images.shape[1:] != options.shape:  # Large images are stored with channels last.
        images = images.permute(0, 3, 1, 2)
    rows = options.select_rows(sizes)
    train = images[rows["train"]]
    mean, std = compute_statistics(train) if options.train_size else (metadata["mean"], metadata["std"])
    label_of = {name: label for label, name in enumerate(classes)}
    splits: dict[str, Any] = {}
    for (split, class_of), part in zip(listing.splits.items(), images.split([*sizes.values()]), strict=True):
        labels = torch.tensor([label_of[name] for name in class_of.values()])
        files, sha256 = ImageFiles(folder, [*class_of], listing.read), metadata["sha256"][split]
        full_split = Split(
            part, labels, tuple(mean), tuple(std), tuple(classes), is_mapped=True, files=files, sha256=sha256
        )
        splits[split] = full_split.subset(rows[split])
    return splits


def _fingerprint(listing: ImageListing, options: DecodingOptions) -> str:
    """Return a hash of everything that determines the pixels."""
    folder = listing.folder
    files = [(split, path, _file_signature(folder / path)) for split, paths in listing.splits.items() for path in paths]
    # `disk` decodes with the installed packages, so the cached pixels must come from the same versions.
    versions = [CACHE_VERSION, *(version(package) for package in ("pillow", "torch", "torchvision"))]
    containers = [(str(path), _file_signature(path)) for path in listing.containers]
    contents = [str(folder.resolve()), versions, vars(options.reader), containers, files]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _file_signature(path: Path) -> tuple[int, ...] | None:
    """Return a signature that changes with the content of a file, without reading it; None for a missing file.

    `mv` and archive tools preserve size and modification time, but not the ctime. When a parent folder or the target
    of a link is replaced, only the inode changes.
    """
    with suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return None


def _decode(listing: ImageListing, options: DecodingOptions, metadata: dict[str, Any]) -> Iterator[tuple[Tensor]]:
    """Yield each readable image as `[1, C, H, W]`, a large one as `[1, H, W, C]`, and fill `metadata`.

    The metadata are the messages about unreadable images by name, the SHA-256 of the pixels of each split, and the mean
    and standard deviation of the training images.
    """
    layout = torch.channels_last if is_large(options.shape) else torch.contiguous_format
    threads = available_cores()
    metadata |= {"unreadable": {}, "sha256": {}}
    for split, images in listing.splits.items():
        sums, checksum, names = np.zeros((3, options.shape[0]), np.uint64), hashlib.sha256(), [*images]
        paths = [listing.folder / name for name in names]
        blocks = [paths[start : start + BLOCK_SIZE] for start in range(0, len(paths), BLOCK_SIZE)]
        # Threads, because Pillow releases the GIL while it decodes and resizes.
        read = BackgroundMap(partial(_read, listing.read), blocks, threads, 2 * threads, create_decoder_context())
        with (
            closing(read) as results,
            tqdm(chain.from_iterable(results), f"decoding once: {split}", len(names), leave=False, disable=None) as bar,
        ):
            for name, result in zip(names, bar, strict=True):
                if isinstance(result, DataError):
                    metadata["unreadable"][name] = str(result)
                    continue
                image, image_sums = result
                sums += image_sums
                checksum.update(image.contiguous().numpy().data)
                yield (as_contiguous_rows(image.contiguous(memory_format=layout)),)
        metadata["sha256"][split] = checksum.hexdigest()
        if split == "train":
            if not sums.any():  # Raise here, before the cache is stored.
                raise _make_unreadable_error(metadata["unreadable"], listing, "none is left for training")
            metadata["mean"], metadata["std"] = compute_mean_and_std(sums)


def _read(read: ReadImage, paths: Sequence[Path]) -> list[tuple[Tensor, NDArray[np.uint64]] | DataError]:
    """Return each image `[1, C, H, W]` with its `sum_channels`, or the error if it cannot be read."""
    results: list[tuple[Tensor, NDArray[np.uint64]] | DataError] = []
    for path in paths:
        try:
            image = to_tensor(read(path))[None]
            results.append((image, sum_channels(image)))
        except DataError as error:
            results.append(error)
    return results
