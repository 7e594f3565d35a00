"""A folder of images, with a subfolder per class."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from vitmnist.config.validation import bounded
from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, Split
from vitmnist.data.datasets.class_folders import SHOWN_NAMES, Samples, find_samples, shorten
from vitmnist.data.decoded_cache import CacheEntry, ResumableChunks, decode_resumably
from vitmnist.data.image_io import Mode, is_colour, read_picture, to_tensor
from vitmnist.data.tensors import TensorSet, channel_statistics
from vitmnist.data.threads import map_in_threads
from vitmnist.errors import ConfigError, DataError
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

CACHE = "vitmnist-cache"  # below data.root
CHUNK = 8  # pictures that a thread decodes at a time: few, so that all threads end together and little is lost
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
    verify_cache: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return (1 if self.mode == Mode.grey else 3), self.size, self.size


class FolderImageReader:
    """Reads image i of a list of files, resized and converted."""

    def __init__(self, paths: list[Path], size: int, mode: Mode) -> None:
        self.paths, self.size, self.mode = paths, size, mode

    def __getitem__(self, index: int) -> Image.Image:
        return read_picture(self.paths[index], (self.size, self.size), self.mode)


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, or in `path/train/CLASS/` and `path/test/CLASS/`, decoded once into `root`.

    Within a split the images are ordered by a hash of their names, which mixes the classes and stays the same when
    images are added. Without a folder `test`, the first `test_share` of each class in this order are the test split.

    Raises:
        ConfigError: `path` is no such folder, or a size is larger than its split.
        DataError: classes without images, or unreadable images that are not to be skipped; names them.
    """
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    classes, train_samples, test_samples = find_samples(folder, options.test_share, options.skip_unreadable)
    options.spans(len(train_samples), len(test_samples))  # refused before anything is decoded
    decoders = [FolderDecoder(folder, samples, options, root / CACHE) for samples in (train_samples, test_samples)]
    train, test = (decoder.decode() for decoder in decoders)
    unreadable = [message for entry in (train, test) for _, message in entry.notes["unreadable"]]
    if unreadable and not options.skip_unreadable:
        raise _unreadable_error(unreadable, len(train_samples + test_samples), root / CACHE, SKIP)
    train_paths, test_paths = (decoder.readable(entry) for decoder, entry in zip(decoders, (train, test), strict=True))
    left_out = sorted({path for path, _ in train_samples + test_samples} - {*train_paths, *test_paths})
    log.info(
        "%s: %d training and %d test pictures of %d classes: %s",
        *(folder, len(train_paths), len(test_paths), len(classes), shorten(classes)),
    )
    if left_out:
        log.warning("%s: %d pictures cannot be read and are left out: %s", folder, len(left_out), shorten(left_out))
    if coloured := train.notes.get("coloured"):
        log.warning(
            "%s: %d of the first %d training pictures are in colour, which data.dataset.mode=grey drops; "
            "data.dataset.mode=rgb keeps it",
            *(folder, coloured, min(COLOUR_SAMPLES, len(train_paths))),
        )
    train_span, test_span = options.spans(len(train_paths), len(test_paths))
    mean, std = tuple(train.notes["mean"]), tuple(train.notes["std"])
    if options.train_size:
        mean, std = channel_statistics(train.tensors.images[train_span])

    def split(entry: CacheEntry, paths: list[Path], span: slice) -> Split:
        return Split(
            entry.tensors.images, entry.tensors.labels, mean, std, tuple(classes),
            mapped=True, sha256=entry.sha256, files=[str(path.relative_to(folder)) for path in paths],
            open_reader=partial(FolderImageReader, paths, options.size, options.mode),
        ).part(span)  # fmt: skip

    return Dataset(
        folder.resolve().name,
        train=split(train, train_paths, train_span),
        test=split(test, test_paths, test_span),
        skipped=len(left_out),
    )


class FolderDecoder:
    """Decodes samples on all cores; `unreadable` has the messages of those that cannot be read, by index."""

    def __init__(self, folder: Path, samples: Samples, options: ImageFolderOptions, cache: Path) -> None:
        self.folder, self.samples, self.options, self.cache = folder, samples, options, cache
        self.unreadable: dict[int, str] = {}
        self.fingerprint = self._fingerprint()

    def decode(self) -> CacheEntry:
        """The decoded samples, from the folder `cache` if they are there."""
        return decode_resumably(self.cache, self.fingerprint, self, self.options.verify_cache)

    def readable(self, entry: CacheEntry) -> list[Path]:
        """The files of the samples in `entry`."""
        left_out = dict(entry.notes["unreadable"])
        return [path for index, (path, _) in enumerate(self.samples) if index not in left_out]

    def chunks(self, finished: list[dict[str, Any]]) -> ResumableChunks:
        """The chunks after those that are finished; each is kept with its end and its unreadable samples."""
        start, size = finished[-1]["end"] if finished else 0, len(self.samples)
        if finished:
            log.info("%d of %d pictures are decoded already, before an interruption", start, size)
            self.unreadable.update(pair for notes in finished for pair in notes["unreadable"])
        spans = [range(first, min(first + CHUNK, size)) for first in range(start, size, CHUNK)]
        # Threads, because Pillow releases Python's lock while it decodes and resizes.
        with (
            closing(map_in_threads(self._decode, spans, available_cores())) as chunks,
            tqdm(total=size, initial=start, desc="decoding once", leave=False, disable=None) as bar,
        ):
            for images, labels, notes in chunks:
                self.unreadable.update(notes["unreadable"])
                yield images, labels, notes
                bar.update(notes["end"] - bar.n)
        if len(self.unreadable) == size:
            advice = "none is left" if self.options.skip_unreadable else SKIP
            raise _unreadable_error(list(self.unreadable.values()), size, self.cache, advice)

    def is_current(self, notes: dict[str, Any]) -> bool:
        """Whether what could not be read still cannot: a network folder may have been away for a moment."""
        unreadable = [index for index, _ in notes["unreadable"]]
        return not unreadable or len(self._decode(unreadable)[1]) == 0

    def notes(self, tensors: TensorSet) -> dict[str, Any]:
        """What the cache keeps besides the images and labels."""
        if self._fingerprint() != self.fingerprint:
            raise DataError(f"{self.folder}: pictures were changed while they were decoded; start again")
        mean, std = channel_statistics(tensors.images)
        notes: dict[str, Any] = {"mean": mean, "std": std, "unreadable": list(self.unreadable.items())}
        if self.options.mode == Mode.grey:
            readable = (path for index, (path, _) in enumerate(self.samples) if index not in self.unreadable)
            notes["coloured"] = sum(is_colour(path) for path in islice(readable, COLOUR_SAMPLES))
        return notes

    def _fingerprint(self) -> str:
        # Everything that changes the pixels, but not the files' contents: reading those would take as long as decoding.
        files = [(str(path.relative_to(self.folder)), label, *_stat(path)) for path, label in self.samples]
        described = json.dumps([str(self.folder.resolve()), self.options.size, self.options.mode.value, files])
        return hashlib.sha256(described.encode()).hexdigest()

    def _decode(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        images, labels, unreadable = [], [], []
        for index in indices:
            path, label = self.samples[index]
            try:
                images.append(to_tensor(read_picture(path, self.options.shape[1:], self.options.mode)))
                labels.append(label)
            except DataError as error:
                unreadable.append((index, str(error)))
        stacked = torch.stack(images) if images else torch.empty(0, *self.options.shape, dtype=torch.uint8)
        return stacked, torch.tensor(labels, dtype=torch.int64), {"end": indices[-1] + 1, "unreadable": unreadable}


def _stat(path: Path) -> tuple[int, int]:
    """Size and time of change."""
    try:
        stat = path.stat()
    except OSError:  # a dangling link, which is found unreadable when it is decoded
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _unreadable_error(messages: list[str], size: int, cache: Path, advice: str) -> DataError:
    shown = "\n".join(messages[:SHOWN_NAMES])
    if len(messages) > SHOWN_NAMES:
        listed = cache / "unreadable.txt"
        write_atomic(listed, "".join(f"{message}\n" for message in messages).encode(errors="surrogateescape"))
        shown += f"\n… and {len(messages) - SHOWN_NAMES} more; {listed} lists all"
    return DataError(f"{len(messages)} of {size} pictures cannot be read:\n{shown}\n{advice}")
