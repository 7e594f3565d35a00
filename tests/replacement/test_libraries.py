"""Samples and collate functions of other libraries give the same batches, if the library is installed.

tests/frameworks has the transforms of albumentations and MONAI.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.pictures import check_same
from tests.support.processes import FORKS
from tests.support.samples import Made
from vitmnist.replacement.sample_dataset import SampleDataset

SIZE = 24


def check_batches(batch_type: type, build: Callable[[], DataLoader[Any]]) -> None:
    """Assert that a replacement stores samples, and gives the batches of the original, which have a certain type."""
    replaced = check_same(build)
    assert isinstance(replaced.dataset, SampleDataset)
    assert isinstance(next(iter(replaced)), batch_type)


@pytest.mark.slow  # It imports transformers; test_stored_samples.py has similar encodings.
def test_encodings_of_tokenizers_are_stored(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = [*"abcdefgh", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"))

    def text(index: int) -> str:
        return " ".join(words[: 1 + index % 8])

    encodings = Made(lambda index: tokenizer(text(index)), SIZE)
    for dataset, collate, workers in (
        (encodings, transformers.DataCollatorWithPadding(tokenizer), 2),
        (encodings, lambda samples: tokenizer.pad(samples, return_tensors="pt"), 0),
        (Made(text, SIZE), lambda samples: tokenizer(samples, padding=True, return_tensors="pt"), 0),
    ):
        build = partial(DataLoader, dataset, 4, shuffle=True, num_workers=workers, collate_fn=collate)
        check_batches(transformers.BatchEncoding, build)


@FORKS
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.needs("fork"))])
def test_graphs_of_torch_geometric_are_stored(workers: int) -> None:
    geometric = pytest.importorskip("torch_geometric")
    from torch_geometric import loader, transforms

    def graph(index: int) -> Any:
        numbers, nodes = torch.Generator().manual_seed(index), 3 + index % 5
        edges = torch.randint(nodes, (2, 2 * nodes), generator=numbers)
        return geometric.data.Data(torch.rand(nodes, 4, generator=numbers), edges, y=torch.tensor([index]))

    class Graphs(geometric.data.Dataset):  # type: ignore[misc]
        def len(self) -> int:
            return SIZE

        def get(self, index: int) -> Any:
            return graph(index)

    split = transforms.Compose([transforms.NormalizeFeatures(), transforms.RandomNodeSplit(num_val=1, num_test=1)])
    for dataset in (Made(graph, SIZE), Graphs(), Graphs(transform=split)):
        # A forked worker needs no pickle of `Graphs`, which is a local class.
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        build = partial(loader.DataLoader, dataset, 4, shuffle=True, follow_batch=["y"], **options)
        check_batches(geometric.data.Batch, build)
