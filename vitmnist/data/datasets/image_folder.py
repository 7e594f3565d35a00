"""A folder of images, with a subfolder per class or a table of labels."""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmnist.config.validation import config_field, read_size, section
from vitmnist.data.channel_statistics import compute_mean_and_std, compute_statistics, sum_channels
from vitmnist.data.datasets.base import DATASETS, Dataset, FileReader, ImageFiles, SizeOptions, Split
from vitmnist.data.image_listing import (
    EXTENSIONS,
    ClassifiedFiles,
    LabelledFiles,
    describe_empty_classes,
    label_splits,
    list_files,
    list_splits,
    sort_by_hash,
)
from vitmnist.data.images import ColorMode, ImageReader, ResizeMode, collect_file_warnings, to_tensor
from vitmnist.data.label_table import TableColumns, read_label_table
from vitmnist.errors import ConfigError, DataError, join_names
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import available_cores, decoder_thread_context
from vitmnist.runtime.files import expand_home
from vitmnist.runtime.progress import tqdm
from vitmnist.store.cache_file import open_or_write_cache
from vitmnist.store.rows import as_contiguous_rows, is_large

log = logging.getLogger(__name__)

CACHE_FOLDER = "vitmnist-cache"
"""The folder for decoded images, below `data.root`."""
CACHE_VERSION = 10
"""The version of the decoded pixels and of their metadata. Images in a cache of another version are decoded again."""
MIN_STD = 8
"""A lower standard deviation of the pixels causes a warning. 12-bit data in 16-bit files is always below it."""
BLOCK = 8
"""Images that a thread reads per hand-over. Handing over single images would cost a thread switch for each."""
PROBED_IMAGES = 100
"""The number of images that decide whether images are read in colour."""
MAX_NAMED_FILES = 5
"""Maximum number of files to name in the message about unreadable images."""


@dataclass
class DecodingOptions(SizeOptions):
    """How encoded images become pixels. A subclass lists the images."""

    path: str = config_field(may_change=True)  # Checksums tell whether the images are the same.
    size: Any = config_field(28, at_least=1)
    mode: ColorMode = ColorMode.auto
    resize: ResizeMode = ResizeMode.stretch
    test_share: float = config_field(0.2, at_least=0, below=1)
    skip_unreadable: bool = False
    draft: bool = True
    max_16_bit: int = config_field(65_535, at_least=1, at_most=65_535)
    # The bounds admit any float32.
    range_32_bit: tuple[float, float] | None = config_field(None, is_range=True, at_least=-3.5e38, at_most=3.5e38)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == ColorMode.grey else 3), *read_size("data.dataset.size", self.size)

    @property
    def reader(self) -> ImageReader:
        """The reader that turns a file into pixels."""
        values = self.range_32_bit and (self.range_32_bit[0], self.range_32_bit[1])  # OmegaConf turned it into a list.
        return ImageReader(self.shape[1:], self.mode, self.resize, self.draft, self.max_16_bit, values)

    def resolve_auto(self) -> dict[str, Any]:
        """Return the value for `mode: auto`: rgb if any of the first hundred images has colours, else grey."""
        if self.mode != ColorMode.auto:
            return {}
        folder = expand_home(self.path)
        read, paths = self.list_images(folder)
        for path, _ in sort_by_hash([(path, "") for path in paths], folder)[:PROBED_IMAGES]:
            with suppress(DataError):  # It is reported when all images are decoded.
                pixels = np.asarray(read(path))
                if (pixels != pixels[:, :, :1]).any():
                    return {"mode": "rgb"}
        return {"mode": "grey"}

    def list_images(self, folder: Path) -> tuple[FileReader, Sequence[Path]]:
        """Return the paths of all images below `folder`, and a function that reads them."""
        raise NotImplementedError


@dataclass
class ImageFolderOptions(DecodingOptions):
    """See `conf/data/dataset/image_folder.yaml`."""

    labels: str | None = config_field(None, may_change=True)
    columns: TableColumns = section(TableColumns, may_change=True)
    suffix: str = config_field("", may_change=True)

    def list_images(self, folder: Path) -> tuple[FileReader, Sequence[Path]]:
        files = list_files(folder)
        images = [path for path in files if path.name.lower().endswith(EXTENSIONS)]
        return self.reader, images or files  # A table can name files of any ending.


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, in `path/train/CLASS/`, `path/val/CLASS/` …, or in a table; decoded once into `root`.

    Raises:
        ConfigError: the folder does not exist, or as `decode_dataset`.
        DataError, OutOfSpaceError: as `decode_dataset`.
    """
    options, folder = replace(options, **options.resolve_auto()), expand_home(options.path).absolute()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    folds: Mapping[str, int] | None = None
    if options.labels:
        source = expand_home(options.labels)
        skip = options.skip_unreadable
        classified, folds = read_label_table(source, options.columns, options.suffix, folder, skip)
    else:
        source, classified = folder, list_splits(folder)
    return replace(decode_dataset(options, root, folder, source, classified, options.reader), folds=folds)


def decode_dataset(
    options: DecodingOptions,
    root: Path,
    folder: Path,
    source: Path,
    classified: dict[str, ClassifiedFiles],
    read: FileReader,
    containers: Sequence[Path] = (),
) -> Dataset:
    """Decode the images of all splits once into `root`, and make a dataset of them.

    Within a split, images are ordered by a hash of their names. The order mixes the classes and stays the same when
    images are added. If only a training split exists, the first `test_share` of each class become the test split.

    Args:
        folder: the folder of all images.
        source: the folder or the table of labels, for messages.
        read: reads an image by its path.
        containers: the files that contain the images, if these are not files.

    Raises:
        ConfigError: a size is larger than its split.
        DataError: a class has no images, or images are unreadable and `skip_unreadable` is false.
        OutOfSpaceError: the disk of `root` has too little room for the decoded images.
    """
    if options.range_32_bit and options.range_32_bit[0] == options.range_32_bit[1]:
        raise ConfigError(f"data.dataset.range_32_bit={[*options.range_32_bit]}: black and white must differ")
    classes, files = label_splits(source, classified, folder, options.test_share, options.skip_unreadable)
    # Refuse sizes that are too large before anything is decoded.
    options.spans(len(files["train"]), len(files.get("test", ())))
    decoder = FolderDecoder(folder, files, options, read, containers)
    (images, labels), metadata = open_or_write_cache(
        root / CACHE_FOLDER, decoder.fingerprint(), len(decoder.samples), decoder.decode, decoder.metadata
    )
    if images.shape[1] != options.shape[0]:  # Large images are stored with channels last.
        images = images.permute(0, 3, 1, 2)
    if metadata["unreadable"] and not options.skip_unreadable:
        advice = "repair or remove them, or set data.dataset.skip_unreadable=true to leave them out"
        raise _unreadable_error([message for _, message in metadata["unreadable"]], len(decoder.samples), advice)
    _log_problems(folder, metadata)
    splits = _make_splits(decoder, images, labels, classes, metadata)
    return Dataset(folder.resolve().name, **splits, skipped=len(metadata["unreadable"]))


def _make_splits(
    decoder: FolderDecoder, images: Tensor, labels: Tensor, classes: list[str], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the splits, by name, from the images that could be read."""
    folder, options, unreadable = decoder.folder, decoder.options, dict(metadata["unreadable"])
    readable = [index for index in range(len(decoder.samples)) if index not in unreadable]
    starts = [sum(index < start for index in readable) for start in decoder.starts]
    rows = {name: slice(start, stop) for name, (start, stop) in zip(decoder.splits, pairwise(starts), strict=True)}
    classes, labels = _readable_classes(folder, classes, labels, rows)
    sizes = {name: span.stop - span.start for name, span in rows.items()}
    shown = " and ".join(f"{size} {name}" for name, size in sizes.items())
    mode = "grey; rgb keeps colours" if options.mode == ColorMode.grey else "rgb"
    message = "%s: %s images of %d classes: %s (data.dataset.mode=%s)"
    log.info(message, folder, shown, len(classes), join_names(classes), mode)
    train_rows, test_rows = options.spans(sizes["train"], sizes.get("test", 0))
    rows_to_use = {"train": train_rows, "validation": slice(None), "test": test_rows}
    mean, std = compute_statistics(images[train_rows]) if options.train_size else (metadata["mean"], metadata["std"])
    files = ImageFiles(folder, [decoder.names[index] for index in readable], decoder.read)
    dataset = Split(images, labels, tuple(mean), tuple(std), tuple(classes), is_mapped=True, files=files)
    return {
        name: replace(dataset.subset(span), sha256=sha256).subset(rows_to_use[name])
        for (name, span), sha256 in zip(rows.items(), metadata["sha256"], strict=True)
    }


def _log_problems(folder: Path, metadata: Mapping[str, Any]) -> None:
    for problem, names in {
        "images cannot be read and are left out": [message for _, message in metadata["unreadable"]],
        "images have the same pixels as one of another split": metadata["copies"],
        "images are read with a warning": metadata["warnings"],
    }.items():
        if names:
            log.warning("%s: %d %s: %s", folder, len(names), problem, join_names(names))
    if (deviation := 255 * max(metadata["std"])) < MIN_STD:
        log.warning(
            "%s: the pixels hardly differ, their standard deviation is %.1f of 255; set data.dataset.max_16_bit=4095 "
            "for 16-bit files of 12-bit cameras, or data.dataset.range_32_bit=[BLACK,WHITE] for int32 and float pixels",
            *(folder, deviation),
        )


def _readable_classes(
    folder: Path, classes: list[str], labels: Tensor, rows: dict[str, slice]
) -> tuple[list[str], Tensor]:
    """Return the classes with readable training images, and the labels for them.

    Raises:
        DataError: fewer than two classes are left, or a class without training images has images in another split.
    """
    counts = torch.stack([labels[span].bincount(minlength=len(classes)) for span in rows.values()])
    is_left = counts[0] > 0
    if empty := [name for name, left in zip(classes, is_left, strict=True) if not left]:
        message = describe_empty_classes(folder, empty, len(classes))
        if is_left.sum() < 2 or counts[:, ~is_left].any():
            raise DataError(f"{message} that can be read for training; add some, or remove these classes")
        log.warning("%s; left out", message)
        classes = [name for name in classes if name not in empty]
        labels = (is_left.cumsum(0) - 1)[labels]
    return classes, labels


def _unreadable_error(messages: list[str], size: int, advice: str) -> DataError:
    shown = messages[:MAX_NAMED_FILES]
    return DataError("\n".join([f"{len(messages)} of {size} images cannot be read, such as:", *shown, advice]))


def _file_signature(path: Path) -> tuple[int, ...] | None:
    """Return a signature that changes with the content of a file, without reading it; None for a missing file.

    `mv` and archive tools preserve size and modification time, but not the ctime. When a parent folder or the target
    of a link is replaced, only the inode changes.
    """
    with suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return None


class FolderDecoder:
    """Decodes the images of all splits of a folder on all cores; the training split comes first."""

    def __init__(
        self,
        folder: Path,
        splits: Mapping[str, LabelledFiles],
        options: DecodingOptions,
        read: FileReader,
        containers: Sequence[Path],
    ) -> None:
        self.folder, self.splits, self.options, self.read, self.containers = folder, splits, options, read, containers
        self.samples = [sample for files in splits.values() for sample in files]
        self.names = [path.relative_to(folder).as_posix() for path, _ in self.samples]
        self.starts = [0, *accumulate(map(len, splits.values()))]
        """The index of the first sample of each split, and the number of samples."""
        self.unreadable: list[tuple[int, str]] = []
        self.copies: list[str] = []
        self.warnings: dict[Path, str] = {}
        self.sums = [np.zeros((3, options.shape[0]), np.uint64) for _ in splits]
        self.checksums = [hashlib.sha256() for _ in splits]

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the pixels."""
        files = [
            (name, label, _file_signature(path)) for name, (path, label) in zip(self.names, self.samples, strict=True)
        ]
        # `disk` decodes with the installed packages, so the cached pixels must come from the same versions.
        decoders = [version(package) for package in ("pillow", "torch", "torchvision")]
        options = [CACHE_VERSION, *decoders, *self.starts[1:-1], vars(self.options.reader)]
        containers = [(str(path), _file_signature(path)) for path in self.containers]
        contents = json.dumps([str(self.folder.resolve()), *options, *containers, files])
        return hashlib.sha256(contents.encode()).hexdigest()

    def decode(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each image, a large one as `[1, H, W, C]`, with its label."""
        layout = torch.channels_last if is_large(self.options.shape) else torch.contiguous_format
        threads, split_of_digest = available_cores(), dict[bytes, int]()
        labels = torch.tensor([label for _, label in self.samples])
        size = len(self.samples)
        blocks = [self.samples[start : start + BLOCK] for start in range(0, size, BLOCK)]
        # Threads, because Pillow releases the GIL while it decodes and resizes.
        with (
            collect_file_warnings() as self.warnings,
            closing(BackgroundMap(self._read, blocks, threads, 2 * threads, decoder_thread_context())) as results,
            tqdm(chain.from_iterable(results), "decoding once", size, leave=False, disable=None) as progress,
        ):
            for index, result in enumerate(progress):
                if isinstance(result, DataError):
                    self.unreadable.append((index, str(result)))
                    continue
                image, sums, digest = result
                split = bisect_right(self.starts, index) - 1
                if split_of_digest.setdefault(digest, split) != split:
                    self.copies.append(self.names[index])
                self.sums[split] += sums
                self.checksums[split].update(image.contiguous().numpy().data)
                yield as_contiguous_rows(image.contiguous(memory_format=layout)), labels[index : index + 1]
        if self.unreadable and not all(sums.any() for sums in self.sums):
            # Raise here, before the cache is stored.
            raise _unreadable_error([message for _, message in self.unreadable], len(self.samples), "none is left")

    def metadata(self) -> dict[str, Any]:
        """Return plain values to store with the decoded images."""
        mean, std = compute_mean_and_std(self.sums[0])
        checksums = [checksum.hexdigest() for checksum in self.checksums]
        warned = [f"{path}: {message}" for path, message in sorted(self.warnings.items())]
        problems = {"unreadable": self.unreadable, "copies": self.copies, "warnings": warned}
        return {**problems, "mean": mean, "std": std, "sha256": checksums}

    def _read(self, samples: LabelledFiles) -> list[tuple[Tensor, NDArray[np.uint64], bytes] | DataError]:
        """Return each image `[1, C, H, W]`, its `sum_channels` and a hash, or the error if it cannot be read."""
        results: list[tuple[Tensor, NDArray[np.uint64], bytes] | DataError] = []
        for path, _ in samples:
            try:
                pixels = np.asarray(self.read(path))
            except DataError as error:
                results.append(error)
            else:
                image = to_tensor(pixels)[None]
                results.append((image, sum_channels(image), hashlib.blake2b(pixels.data, digest_size=16).digest()))
        return results
