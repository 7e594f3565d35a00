"""A folder of images, with a subfolder per class or a table of labels."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from vitmnist.config.validation import bounded, described
from vitmnist.data.channels import ChannelSums, channel_statistics, empty_images, rows_in_memory
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split
from vitmnist.data.datasets.class_folders import SHOWN_NAMES, Samples, find_samples, shorten
from vitmnist.data.decoded_cache import decode_once
from vitmnist.data.image_io import Mode, PictureReader, Resize, is_colour, to_tensor
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.backend import one_core_each
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.files import home_expanded
from vitmnist.runtime.ordered_map import ordered_map

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"  # below data.root
VERSION = 3  # of the decoded pixels and the notes about them; another one makes caches decode again
CHUNK = 8  # pictures that a thread decodes at a time: few, so that all threads end together
COLOUR_SAMPLES = 100  # pictures checked for colour
SKIP = "repair or remove them, or type data.dataset.skip_unreadable=true to leave them out"


@dataclass
class ImageFolderOptions(SizeOptions):
    """See `conf/data/dataset/image_folder.yaml`."""

    path: str = described(may_change=True)  # the checksums of images and labels tell whether they are the same
    labels: str | None = described(None, may_change=True)
    size: int = bounded(28, at_least=1)
    mode: Mode = Mode.grey
    resize: Resize = Resize.stretch
    test_share: float = bounded(0.2, at_least=0, below=1)
    skip_unreadable: bool = False
    draft: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == Mode.grey else 3), self.size, self.size

    @property
    def reader(self) -> PictureReader:
        """How a file becomes an image."""
        return PictureReader((self.size, self.size), self.mode, self.resize, self.draft)


@dataclass
class FolderImageReader:
    """Reads image i of a list of files."""

    paths: list[Path]
    reader: PictureReader

    def __getitem__(self, index: int) -> Image.Image:
        return self.reader(self.paths[index])


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, in `path/train/CLASS/`, `path/val/CLASS/` …, or in a table; decoded once into `root`.

    Within a split the images are ordered by a hash of their names, which mixes the classes and stays the same when
    images are added. Without another split, the first `test_share` of each class in this order are the test split.

    Raises:
        ConfigError: `path` is no such folder, or a size is larger than its split.
        DataError: classes without images, or unreadable images that are not to be skipped; names them.
        DoesNotFitError: the disk of `root` has too little room for the decoded images.
    """
    folder = home_expanded(options.path)
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    labels_file = home_expanded(options.labels) if options.labels else None
    classes, parts = find_samples(folder, labels_file, options.test_share, options.skip_unreadable)
    # Sizes that are too large are refused before anything is decoded.
    options.spans(len(parts["train"]), len(parts.get("test", ())))
    decoder = FolderDecoder(folder, [*parts.values()], options)
    samples = decoder.samples
    entry = decode_once(root / CACHE, decoder.fingerprint(), len(samples), decoder.decode, decoder.notes)
    (images, labels), notes = entry.mapped, entry.notes
    if images.shape[1] != options.shape[0]:  # large ones are stored with channels last, but for those of older caches
        images = images.permute(0, 3, 1, 2)
    entry.checksums[1].checked(labels)
    unreadable = dict(notes["unreadable"])
    _warn(folder, notes["coloured"], list(unreadable.values()), len(samples), options)
    readable = [index for index in range(len(samples)) if index not in unreadable]
    starts = [sum(index < first for index in readable) for first in decoder.starts]
    rows = {split: slice(*ends) for split, ends in zip(parts, pairwise(starts), strict=True)}
    sizes = {split: span.stop - span.start for split, span in rows.items()}
    shown = " and ".join(f"{size} {split}" for split, size in sizes.items())
    log.info("%s: %s pictures of %d classes: %s", folder, shown, len(classes), shorten(classes))
    train_span, test_span = options.spans(sizes["train"], sizes.get("test", 0))
    mean, std = tuple(notes["mean"]), tuple(notes["std"])
    if options.train_size:
        mean, std = channel_statistics(images[train_span])
    paths = [samples[index][0] for index in readable]
    files = [str(path.relative_to(folder)) for path in paths]
    whole = Split(images, labels, mean, std, tuple(classes), mapped=entry.checksums[0], files=files)
    spans = {"train": train_span, "validation": slice(None), "test": test_span}
    splits = {
        split: whole.part(span, reader=FolderImageReader(paths[span], options.reader), sha256=sha256).part(spans[split])
        for (split, span), sha256 in zip(rows.items(), notes["sha256"], strict=True)
    }
    return Dataset(folder.resolve().name, **splits, skipped=len(unreadable))


def _warn(folder: Path, coloured: int, unreadable: list[str], size: int, options: ImageFolderOptions) -> None:
    """Warn of dropped colours and of unreadable pictures; raise `DataError` if those must not be left out."""
    if coloured:
        log.warning(
            "%s: %d of the first %d pictures are in colour, which data.dataset.mode=grey drops; "
            "data.dataset.mode=rgb keeps it",
            *(folder, coloured, min(COLOUR_SAMPLES, size)),
        )
    if unreadable and not options.skip_unreadable:
        raise _unreadable_error(unreadable, size, SKIP)
    if unreadable:
        log.warning("%s: %d pictures cannot be read and are left out: %s", folder, len(unreadable), shorten(unreadable))


def _unreadable_error(unreadable: list[str], size: int, advice: str) -> DataError:
    shown = unreadable[:SHOWN_NAMES]
    if more := len(unreadable) - len(shown):
        shown.append(f"… and {more} more")
    return DataError("\n".join([f"{len(unreadable)} of {size} pictures cannot be read:", *shown, advice]))


class FolderDecoder:
    """Decodes the samples of all splits of a folder on all cores; `notes` is stored with them.

    Args:
        parts: the samples of each split, that for training first.
    """

    def __init__(self, folder: Path, parts: list[Samples], options: ImageFolderOptions) -> None:
        self.folder, self.parts, self.options = folder, parts, options
        self.samples = [sample for part in parts for sample in part]
        self.starts = [0, *accumulate(map(len, parts))]  # and the end of the last
        self.unreadable: list[tuple[int, str]] = []
        self.coloured = 0
        self.sums = [ChannelSums() for _ in parts]
        self.checksums = [hashlib.sha256() for _ in parts]

    def fingerprint(self) -> str:
        """Changes with everything that changes the pixels; by sizes and times, since reading files takes too long."""
        files = []
        for path, label in self.samples:
            size = time = None  # of a missing file, which is reported when it is decoded
            with suppress(OSError):
                stat = path.stat()
                size, time = stat.st_size, stat.st_mtime_ns
            files.append((str(path.relative_to(self.folder)), label, size, time))
        reader = self.options.reader
        options = [VERSION, *self.starts[1:-1], self.options.size, reader.mode.value, reader.draft]
        if reader.resize != Resize.stretch:  # caches from before there was a choice stay valid
            options.append(reader.resize.value)
        described = json.dumps([str(self.folder.resolve()), *options, files])
        return hashlib.sha256(described.encode()).hexdigest()

    def decode(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images, large ones as `[B, H, W, C]`, and labels, in chunks.

        Raises:
            DataError: at the end, if unreadable ones are not to be left out.
        """
        size = len(self.samples)
        chunks = [
            (part, range(first, min(first + CHUNK, stop)))
            for part, (start, stop) in enumerate(pairwise(self.starts))
            for first in range(start, stop, CHUNK)
        ]
        spans, threads = [chunk for _, chunk in chunks], available_cores()
        # Threads, because Pillow releases Python's lock while it decodes and resizes.
        with (
            closing(ordered_map(self._decode_chunk, spans, threads, 2 * threads, one_core_each())) as decoded,
            tqdm(total=size, desc="decoding once", leave=False, disable=None) as bar,
        ):
            for (part, chunk), (images, labels, unreadable, coloured, sums) in zip(chunks, decoded, strict=True):
                self.unreadable += unreadable
                self.coloured += coloured
                self.sums[part] += sums
                self.checksums[part].update(images.contiguous().numpy().data)
                yield rows_in_memory(images), labels
                bar.update(len(chunk))
        if self.unreadable and not (self.options.skip_unreadable and all(sums.pixels for sums in self.sums)):
            advice = "none is left" if self.options.skip_unreadable else SKIP
            raise _unreadable_error([message for _, message in self.unreadable], size, advice)  # and keep nothing

    def notes(self) -> dict[str, Any]:
        """Plain values to keep with the decoded pictures."""
        mean, std = self.sums[0].statistics()
        checksums = [checksum.hexdigest() for checksum in self.checksums]
        found = {"unreadable": self.unreadable, "coloured": self.coloured}
        return {**found, "mean": mean, "std": std, "sha256": checksums}

    def _decode_chunk(self, indices: range) -> tuple[Tensor, Tensor, list[tuple[int, str]], int, ChannelSums]:
        images = empty_images(len(indices), *self.options.shape)
        labels: list[int] = []
        unreadable: list[tuple[int, str]] = []
        coloured = 0
        for index in indices:
            path, label = self.samples[index]
            try:
                images[len(labels)] = to_tensor(self.options.reader(path))
                if self.options.mode == Mode.grey and index < COLOUR_SAMPLES:
                    coloured += is_colour(path)
                labels.append(label)
            except DataError as error:
                unreadable.append((index, str(error)))
        images = images[: len(labels)]
        return images, torch.tensor(labels, dtype=torch.int64), unreadable, coloured, ChannelSums.of(images)
