"""Replaces a `DataLoader` whose batches are not rows of tensors, or whose samples are random: stores single samples.

The original's collate function makes the batches, in as many workers as before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.data.random_samples import refuse_random_samples
from vitmnist.replacement.decoded_dataset import DecodedDataLoader, DecodedDataset
from vitmnist.replacement.original_dataloader import check_same_batches, fetch_sample, read_all
from vitmnist.replacement.split_transforms import SplitTransforms
from vitmnist.store.rows import StoreOptions
from vitmnist.store.samples import EncodedSamples, encode_samples, store_samples_in_file, store_samples_in_memory


class SampleDataset(DecodedDataset):
    """A decoded dataset that loads single samples, and applies their random transforms if there are any."""

    encoded_samples: EncodedSamples

    def __getitem__(self, index: int) -> object:
        sample = self.encoded_samples.load(index)
        return self.split_transforms.transform(sample) if self.split_transforms else sample


def replace_by_samples(
    dataloader: DataLoader[Any], options: StoreOptions, examples: Sequence[Any], stages: SplitTransforms | None = None
) -> DataLoader[Any]:
    """Build a replacement that stores single samples, and makes batches with the original's collate function.

    The required memory is estimated from `examples`, some decoded samples.
    """
    dataset: Any = dataloader.dataset
    decode = stages.decode if stages else dataset.__getitem__
    size = len(dataset)
    as_json = options.folder is not None  # Anyone can have written a file, and unpickling can run code.
    sample_nbytes = len(encode_samples(examples, as_json).blocks[0]) / len(examples)
    chunks = partial(read_all, dataloader, partial(_read_samples, decode, as_json), sample_nbytes)
    if options.folder:
        contents = options.fingerprint and f"{options.fingerprint}, {size} samples as JSON"
        samples = store_samples_in_file(chunks, size, options.folder, contents)
    else:
        samples = store_samples_in_memory(chunks(), int(sample_nbytes * size))
    decoded = SampleDataset(dataset, stages, encoded_samples=samples)
    replacement = DecodedDataLoader.from_original(dataloader, decoded, dataloader.num_workers)
    check_same_batches(dataloader, replacement)
    return replacement


def _read_samples(decode: Callable[[int], object], as_json: bool, indices: range) -> EncodedSamples:
    """Decode samples into bytes. Raises `RandomSampleError` if a sample is random."""
    with refuse_random_samples(decode, indices, decode):
        return encode_samples((fetch_sample(decode, index) for index in indices), as_json)
