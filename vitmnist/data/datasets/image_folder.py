"""A folder of images, with a subfolder per class or a table of labels."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from vitmnist.config.validation import config_field, section
from vitmnist.data.channel_statistics import channel_statistics, channel_sums, mean_and_std
from vitmnist.data.datasets.base import DATASETS, Dataset, ImageFiles, SizeOptions, Split
from vitmnist.data.image_listing import LabelledFiles, TableColumns, find_samples, no_pictures
from vitmnist.data.images import ImageReader, Mode, Resize, empty_images, file_warnings
from vitmnist.errors import ConfigError, DataError, join_names
from vitmnist.runtime.cpu import available_cores, one_core_per_thread
from vitmnist.runtime.files import expand_home
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.cache_file import decode_once
from vitmnist.store.rows import rows_in_memory

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"
"""The folder below `data.root` for decoded pictures."""
VERSION = 8
"""Version of the decoded pixels and the notes about them; another one makes caches decode again."""
CHUNK = 8
"""Pictures that a thread decodes at a time: few, so that all threads end together."""
FEW = 5
"""A class with fewer pictures in a split is warned about."""
FAINT = 8
"""Standard deviation of pixels that is warned about; 12-bit pixels in a 16-bit file have at most this one."""
SHOWN_FILES = 5
"""Files that the message about unreadable pictures names."""
SKIP = "repair or remove them, or type data.dataset.skip_unreadable=true to leave them out"


@dataclass
class ImageFolderOptions(SizeOptions):
    """See `conf/data/dataset/image_folder.yaml`."""

    path: str = config_field(may_change=True)  # Checksums tell whether the images are the same.
    labels: str | None = config_field(None, may_change=True)
    columns: TableColumns = section(TableColumns, may_change=True)
    suffix: str = config_field("", may_change=True)
    size: int = config_field(28, at_least=1)
    mode: Mode = Mode.grey
    resize: Resize = Resize.stretch
    test_share: float = config_field(0.2, at_least=0, below=1)
    skip_unreadable: bool = False
    draft: bool = True
    max_16_bit: int = config_field(65_535, at_least=1, at_most=65_535)
    # The bounds hold any float32.
    range_32_bit: tuple[float, float] | None = config_field(None, at_least=-3.5e38, at_most=3.5e38)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == Mode.grey else 3), self.size, self.size

    @property
    def reader(self) -> ImageReader:
        """How a file becomes pixels."""
        values = self.range_32_bit and (self.range_32_bit[0], self.range_32_bit[1])  # OmegaConf makes it a list
        return ImageReader((self.size, self.size), self.mode, self.resize, self.draft, self.max_16_bit, values)


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
    folder = expand_home(options.path).absolute()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    if options.range_32_bit and options.range_32_bit[0] == options.range_32_bit[1]:
        raise ConfigError(f"data.dataset.range_32_bit={[*options.range_32_bit]}: black and white must differ")
    labels_file = expand_home(options.labels) if options.labels else None
    classes, parts = find_samples(
        folder, labels_file, options.test_share, options.skip_unreadable, options.columns, options.suffix
    )
    # Sizes that are too large are refused before anything is decoded.
    options.spans(len(parts["train"]), len(parts.get("test", ())))
    decoder = FolderDecoder(folder, [*parts.values()], options)
    with file_warnings() as decoder.warned:
        (images, labels), notes = decode_once(
            root / CACHE, decoder.fingerprint(), len(decoder.samples), decoder.decode, decoder.notes
        )
    if images.shape[1] != options.shape[0]:  # Large images are stored with channels last.
        images = images.permute(0, 3, 1, 2)
    unreadable = dict(notes["unreadable"])
    if unreadable and not options.skip_unreadable:
        raise _unreadable_error([*unreadable.values()], len(decoder.samples), SKIP)
    _log_notes(folder, notes)
    readable = [index for index in range(len(decoder.samples)) if index not in unreadable]
    starts = [sum(index < first for index in readable) for first in decoder.starts]
    spans = {split: slice(*ends) for split, ends in zip(parts, pairwise(starts), strict=True)}
    classes, labels = _readable_classes(folder, classes, labels, spans)
    sizes = {split: span.stop - span.start for split, span in spans.items()}
    _log_sizes(folder, sizes, classes, options.mode)
    mean, std = notes["mean"], notes["std"]
    train_part, test_part = options.spans(sizes["train"], sizes.get("test", 0))
    if options.train_size:
        mean, std = channel_statistics(images[train_part])
    files = ImageFiles(folder, [decoder.names[index] for index in readable], options.reader)
    whole = Split(images, labels, tuple(mean), tuple(std), tuple(classes), is_mapped=True, files=files)
    used = {"train": train_part, "validation": slice(None), "test": test_part}
    splits: dict[str, Any] = {
        split: replace(whole.subset(span), sha256=sha256).subset(used[split])
        for (split, span), sha256 in zip(spans.items(), notes["sha256"], strict=True)
    }
    return Dataset(folder.resolve().name, **splits, skipped=len(unreadable))


def _log_notes(folder: Path, notes: Mapping[str, Any]) -> None:
    """Warn of what was noticed while the pictures were decoded."""
    for problem, names in {
        "pictures cannot be read and are left out": [message for _, message in notes["unreadable"]],
        "pictures have the same pixels as one of another split": notes["copies"],
        "pictures are read with a warning": notes["warned"],
    }.items():
        if names:
            log.warning("%s: %d %s: %s", folder, len(names), problem, join_names(names))
    if (deviation := 255 * max(notes["std"])) < FAINT:
        log.warning(
            "%s: the pixels hardly differ, their standard deviation is %.1f of 255; set data.dataset.max_16_bit=4095 "
            "for 16-bit files of 12-bit cameras, or data.dataset.range_32_bit=[BLACK,WHITE] for int32 and float pixels",
            *(folder, deviation),
        )


def _log_sizes(folder: Path, sizes: Mapping[str, int], classes: Sequence[str], mode: Mode) -> None:
    shown = " and ".join(f"{size} {split}" for split, size in sizes.items())
    channels = "mode=grey; rgb keeps colours" if mode == Mode.grey else "mode=rgb"
    message = "%s: %s pictures of %d classes: %s (data.dataset.%s)"
    log.info(message, folder, shown, len(classes), join_names(classes), channels)


def _readable_classes(
    folder: Path, classes: list[str], labels: Tensor, rows: dict[str, slice]
) -> tuple[list[str], Tensor]:
    """The classes with readable training pictures, and the labels among these; warns of few pictures of a class.

    Raises:
        DataError: fewer than two classes are left, or another split has pictures of a class that is not.
    """
    counts = torch.stack([labels[span].bincount(minlength=len(classes)) for span in rows.values()])
    is_left = counts[0] > 0
    if empty := [name for name, left in zip(classes, is_left, strict=True) if not left]:
        message = no_pictures(folder, empty, len(classes))
        if is_left.sum() < 2 or counts[:, ~is_left].any():
            raise DataError(f"{message} that can be read for training; add some, or remove these classes")
        log.warning("%s; left out", message)
        classes = [name for name in classes if name not in empty]
        labels, counts = (is_left.cumsum(0) - 1)[labels], counts[:, is_left]
    for split, sizes in zip(rows, counts.tolist(), strict=True):
        if few := [f"{name} ({count})" for name, count in zip(classes, sizes, strict=True) if count < FEW]:
            log.warning(
                "%s: fewer than %d pictures of a class in the %s split: %s", folder, FEW, split, join_names(few)
            )
    return classes, labels


def _unreadable_error(messages: list[str], size: int, advice: str) -> DataError:
    shown = messages[:SHOWN_FILES]
    return DataError("\n".join([f"{len(messages)} of {size} pictures cannot be read, such as:", *shown, advice]))


def _file_signature(path: Path) -> tuple[int, ...] | None:
    """Changes with the content of a file, which is not read; None for a missing one, which is reported later.

    `mv` and archives keep size and modification time, but not the ctime; for a folder or the target of a link, not the
    inode.
    """
    with suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return None


class DecodedChunk(NamedTuple):
    """The pictures of a chunk that can be read, with names, digests and sums; indices and errors of the others."""

    images: Tensor
    labels: Tensor
    digests: list[tuple[str, bytes]]
    unreadable: list[tuple[int, str]]
    sums: NDArray[np.uint64]


class FolderDecoder:
    """Decodes the samples of all splits of a folder on all cores; `notes` is stored with them.

    Args:
        parts: the samples of each split, that for training first.
    """

    def __init__(self, folder: Path, parts: list[LabelledFiles], options: ImageFolderOptions) -> None:
        self.folder, self.options, self.reader = folder, options, options.reader
        self.samples = [sample for part in parts for sample in part]
        self.names = [str(path.relative_to(folder)) for path, _ in self.samples]
        self.starts = [0, *accumulate(map(len, parts))]  # The last number is the end of the last part.
        self.warned: dict[Path, str] = {}
        self.unreadable: list[tuple[int, str]] = []
        self.copies: list[str] = []
        self.sums = [np.zeros((3, options.shape[0]), np.uint64) for _ in parts]
        self.checksums = [hashlib.sha256() for _ in parts]

    def fingerprint(self) -> str:
        """Changes with everything that changes the pixels."""
        files = [
            (name, label, _file_signature(path)) for name, (path, label) in zip(self.names, self.samples, strict=True)
        ]
        options = [VERSION, *self.starts[1:-1], vars(self.reader)]
        described = json.dumps([str(self.folder.resolve()), *options, files])
        return hashlib.sha256(described.encode()).hexdigest()

    def decode(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images, large ones as `[B, H, W, C]`, and labels, in chunks.

        Raises:
            DataError: at the end, if none of a split can be read.
        """
        size, threads = len(self.samples), available_cores()
        chunks = [
            (part, range(first, min(first + CHUNK, stop)))
            for part, (start, stop) in enumerate(pairwise(self.starts))
            for first in range(start, stop, CHUNK)
        ]
        spans, split_of_digest = [span for _, span in chunks], dict[bytes, int]()
        # Threads, because Pillow releases Python's lock while it decodes and resizes.
        with (
            closing(ordered_map(self._decode_chunk, spans, threads, 2 * threads, one_core_per_thread())) as decoded,
            tqdm(total=size, desc="decoding once", leave=False, disable=None) as bar,
        ):
            for (part, span), chunk in zip(chunks, decoded, strict=True):
                self.copies += [
                    name for name, digest in chunk.digests if split_of_digest.setdefault(digest, part) != part
                ]
                self.unreadable += chunk.unreadable
                self.sums[part] += chunk.sums
                self.checksums[part].update(chunk.images.contiguous().numpy().data)
                yield rows_in_memory(chunk.images), chunk.labels
                bar.update(len(span))
        if self.unreadable and not all(sums.any() for sums in self.sums):
            # The cache keeps nothing.
            raise _unreadable_error([message for _, message in self.unreadable], size, "none is left")

    def notes(self) -> dict[str, Any]:
        """Plain values to keep with the decoded pictures."""
        mean, std = mean_and_std(self.sums[0])
        checksums = [checksum.hexdigest() for checksum in self.checksums]
        warned = [f"{path}: {message}" for path, message in sorted(self.warned.items())]
        problems = {"unreadable": self.unreadable, "copies": self.copies, "warned": warned}
        return {**problems, "mean": mean, "std": std, "sha256": checksums}

    def _decode_chunk(self, indices: range) -> DecodedChunk:
        images, labels = empty_images(len(indices), *self.options.shape), list[int]()
        digests: list[tuple[str, bytes]] = []
        unreadable: list[tuple[int, str]] = []
        for index in indices:
            path, label = self.samples[index]
            try:
                pixels = self.reader(path)
            except DataError as error:
                unreadable.append((index, str(error)))
                continue
            digests.append((self.names[index], hashlib.blake2b(pixels.data, digest_size=16).digest()))
            images[len(labels)] = torch.from_numpy(pixels).permute(2, 0, 1)
            labels.append(label)
        images = images[: len(labels)]
        return DecodedChunk(images, torch.tensor(labels, dtype=torch.int64), digests, unreadable, channel_sums(images))
