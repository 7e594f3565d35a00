"""Decodes the samples of a `DataLoader` once and stores them one by one, for batches that are not rows of tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.data.random_samples import refuse_random_samples
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.original_dataloader import fetch_sample, read_all
from vitmnist.replacement.split_transforms import SplitTransforms, list_transforms
from vitmnist.store.read_in_chunks import MapStyleDataset
from vitmnist.store.rows import StoreOptions
from vitmnist.store.samples import EncodedSamples, encode_samples, store_samples_in_file, store_samples_in_memory


class SampleDataset(DecodedDataset):
    """A decoded dataset that loads single samples, and applies their random transforms.

    Args:
        split: has the random transforms. None: no sample is random.
    """

    def __init__(self, original: MapStyleDataset, samples: EncodedSamples, split: SplitTransforms | None) -> None:
        self.encoded_samples, self.split_transforms = samples, split
        deterministic = chain.from_iterable(split.deterministic_transforms) if split else list_transforms(original)
        super().__init__(original, deterministic)

    def __getitem__(self, index: int) -> object:
        sample = self.encoded_samples.load(index)
        return self.split_transforms.transform(sample) if self.split_transforms else sample


def decode_samples(
    dataloader: DataLoader[Any], decode: Callable[[int], object], examples: Sequence[object], options: StoreOptions
) -> EncodedSamples:
    """Decode all samples of a dataset into objects of any structure.

    Args:
        decode: returns the decoded sample for an index.
        examples: decoded samples that the required memory is estimated from.

    Raises:
        DataError: a sample cannot be read or stored. The message names the sample.
        OutOfSpaceError: memory or disk is too small.
        RandomSampleError: a sample is random.
    """
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    named_tuples: dict[str, type] | None = {} if options.folder else None
    sample_nbytes = len(encode_samples(examples, named_tuples).blocks[0]) / len(examples)
    chunks = partial(read_all, dataloader, partial(_read_samples, decode, named_tuples), sample_nbytes)
    if options.folder and named_tuples is not None:
        contents = options.fingerprint and f"{options.fingerprint}, {size} encoded samples"
        return store_samples_in_file(chunks, size, options.folder, contents, named_tuples)
    return store_samples_in_memory(chunks(), int(sample_nbytes * size))


def _read_samples(
    decode: Callable[[int], object], named_tuples: dict[str, type] | None, indices: range
) -> EncodedSamples:
    """Decode samples into bytes. Raises `RandomSampleError` if a sample is random."""
    with refuse_random_samples(decode, indices, decode):
        return encode_samples((fetch_sample(decode, index) for index in indices), named_tuples)
