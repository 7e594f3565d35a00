"""A folder of images, with a subfolder per class."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from vitmnist.config.validation import bounded
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split, stamp
from vitmnist.data.datasets.class_folders import SHOWN_NAMES, Samples, find_samples, shorten
from vitmnist.data.decoded_cache import decode_once
from vitmnist.data.image_io import Mode, is_colour, read_picture, to_tensor
from vitmnist.data.tensors import ChannelSums, TensorSet, channel_statistics
from vitmnist.data.threads import map_in_threads
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"  # below data.root
VERSION = 2  # of the pixels that decoding makes of a file
CHUNK = 8  # pictures that a thread decodes at a time: few, so that all threads end together
SKIP = "mend or remove them, or type data.dataset.skip_unreadable=true to leave them out"
COLOUR_SAMPLES = 100  # training images checked for colour


@dataclass
class ImageFolderOptions(SizeOptions):
    """See `conf/data/dataset/image_folder.yaml`."""

    path: str = MISSING
    size: int = bounded(28, at_least=1)
    mode: Mode = Mode.grey
    test_share: float = bounded(0.2, above=0, below=1)
    skip_unreadable: bool = False
    draft: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == Mode.grey else 3), self.size, self.size


@dataclass
class FolderImageReader:
    """Reads image i of a list of files, resized and converted."""

    paths: list[Path]
    size: int
    mode: Mode
    draft: bool

    def __getitem__(self, index: int) -> Image.Image:
        return read_picture(self.paths[index], (self.size, self.size), self.mode, self.draft)


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, or in `path/train/CLASS/` and `path/test/CLASS/`, decoded once into `root`.

    Within a split the images are ordered by a hash of their names, which mixes the classes and stays the same when
    images are added. Without a folder `test`, the first `test_share` of each class in this order are the test split.

    Raises:
        ConfigError: `path` is no such folder, or a size is larger than its split.
        DataError: classes without images, or unreadable images that are not to be skipped; names them.
        DoesNotFitError: the disk of `root` has too little room for the decoded images.
    """
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    classes, *samples = find_samples(folder, options.test_share, options.skip_unreadable)
    options.spans(*map(len, samples))  # refused before anything is decoded
    train, test = parts = [FolderDecoder(folder, classes, part, options, root / CACHE) for part in samples]
    unreadable = [message for part in parts for _, message in part.unreadable]
    if unreadable and not options.skip_unreadable:
        raise _unreadable_error(unreadable, sum(map(len, samples)), root / CACHE, SKIP)
    sizes = len(train.paths), len(test.paths)
    log.info("%s: %d training and %d test pictures of %d classes: %s", folder, *sizes, len(classes), shorten(classes))
    if unreadable:
        log.warning("%s: %d pictures cannot be read and are left out: %s", folder, len(unreadable), shorten(unreadable))
    notes = train.entry.notes
    if notes["coloured"]:
        log.warning(
            "%s: %d of the first %d training pictures are in colour, which data.dataset.mode=grey drops; "
            "data.dataset.mode=rgb keeps it",
            *(folder, notes["coloured"], min(COLOUR_SAMPLES, sizes[0])),
        )
    spans = options.spans(*sizes)
    mean, std = tuple(notes["mean"]), tuple(notes["std"])
    if options.train_size:
        mean, std = channel_statistics(train.entry.tensors.images[spans[0]])
    train_split, test_split = (part.split(mean, std).part(span) for part, span in zip(parts, spans, strict=True))
    return Dataset(folder.resolve().name, train_split, test_split, skipped=len(unreadable))


class FolderDecoder:
    """A part of a folder, decoded on all cores or found decoded in `cache`.

    `unreadable` has the indices and messages of the samples that cannot be read.
    """

    def __init__(
        self, folder: Path, classes: list[str], samples: Samples, options: ImageFolderOptions, cache: Path
    ) -> None:
        self.folder, self.classes, self.samples, self.options, self.cache = folder, classes, samples, options, cache
        self.unreadable: list[tuple[int, str]] = []
        self.sums = ChannelSums()
        self.fingerprint = self._fingerprint()
        self.entry = decode_once(cache, self.fingerprint, len(samples), self._chunks, self._notes, self._is_current)
        self.unreadable = self.entry.notes["unreadable"]

    @property
    def paths(self) -> list[Path]:
        """The files that can be read."""
        left_out = {index for index, _ in self.unreadable}
        return [path for index, (path, _) in enumerate(self.samples) if index not in left_out]

    def split(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Split:
        """The decoded samples, with these statistics."""
        tensors, paths = self.entry.tensors, self.paths
        return Split(
            tensors.images, tensors.labels, mean, std, tuple(self.classes), mapped=True, sha256=self.entry.sha256,
            reader=FolderImageReader(paths, self.options.size, self.options.mode, self.options.draft),
            files=[str(path.relative_to(self.folder)) for path in paths],
        )  # fmt: skip

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = len(self.samples)
        spans = [range(first, min(first + CHUNK, size)) for first in range(0, size, CHUNK)]
        # Threads, because Pillow releases Python's lock while it decodes and resizes.
        with (
            closing(map_in_threads(self._decode, spans, available_cores())) as chunks,
            tqdm(total=size, desc="decoding once", leave=False, disable=None) as bar,
        ):
            for span, (images, labels, unreadable, sums) in zip(spans, chunks, strict=True):
                self.unreadable += unreadable
                self.sums += sums
                yield images, labels
                bar.update(len(span))
        if len(self.unreadable) == size:
            advice = "none is left" if self.options.skip_unreadable else SKIP
            raise _unreadable_error([message for _, message in self.unreadable], size, self.cache, advice)

    def _decode(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, list[tuple[int, str]], ChannelSums]:
        parts, labels, unreadable = [torch.empty(0, *self.options.shape, dtype=torch.uint8)], [], []
        for index in indices:
            path, label = self.samples[index]
            try:
                picture = read_picture(path, self.options.shape[1:], self.options.mode, self.options.draft)
                parts.append(to_tensor(picture)[None])
                labels.append(label)
            except DataError as error:
                unreadable.append((index, str(error)))
        images = torch.cat(parts)
        return images, torch.tensor(labels, dtype=torch.int64), unreadable, ChannelSums.of(images)

    def _is_current(self, notes: dict[str, Any]) -> bool:
        """Whether what could not be read still cannot: a network folder may have been away for a moment."""
        return not len(self._decode([index for index, _ in notes["unreadable"]])[1])

    def _notes(self, tensors: TensorSet) -> dict[str, Any]:
        if self._fingerprint() != self.fingerprint:
            raise DataError(f"{self.folder}: pictures were changed while they were decoded; start again")
        mean, std = self.sums.statistics()
        checked = self.paths[: COLOUR_SAMPLES if self.options.mode == Mode.grey else 0]
        coloured = map_in_threads(partial(is_colour, draft=self.options.draft), checked, available_cores())
        found = {"unreadable": self.unreadable, "coloured": sum(coloured)}
        return {"classes": self.classes, "mean": mean, "std": std, **found}

    def _fingerprint(self) -> str:
        # Everything that changes the pixels, but not the files' contents: reading those would take as long as decoding.
        files = [(str(path.relative_to(self.folder)), label, *stamp(path)[:2]) for path, label in self.samples]
        options = VERSION, self.options.size, self.options.mode.value, self.options.draft
        described = json.dumps([str(self.folder.resolve()), *options, files])
        return hashlib.sha256(described.encode()).hexdigest()


def _unreadable_error(messages: list[str], size: int, cache: Path, advice: str) -> DataError:
    shown = "\n".join(messages[:SHOWN_NAMES])
    if len(messages) > SHOWN_NAMES:
        listed = cache / "unreadable.txt"
        write_atomic(listed, "".join(f"{message}\n" for message in messages).encode(errors="surrogateescape"))
        shown += f"\n… and {len(messages) - SHOWN_NAMES} more; {listed} lists all"
    return DataError(f"{len(messages)} of {size} pictures cannot be read:\n{shown}\n{advice}")
