"""Datasets, transforms and collate functions of other libraries, each where it is installed: the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.pictures import assert_same, run
from tests.support.samples import Made
from vitmnist import from_dataloader
from vitmnist.data.difference import find_difference
from vitmnist.replacement.decoded_dataset import TransformedDataset
from vitmnist.replacement.frozen_state import preserved_own_generators

SIZE = 24


def check_same(original: DataLoader[Any], **options: Any) -> list[Any]:
    """Assert that a replacement keeps samples and gives the batches of the original; return them."""
    with preserved_own_generators(original):
        expected = run(original)
    replaced = from_dataloader(original, "ram", **options)
    assert isinstance(replaced.dataset, TransformedDataset)
    found = run(replaced)
    assert_same(found, expected)
    return found


def pixels(index: int) -> Any:
    return np.random.default_rng(index).integers(0, 256, (20, 20, 3), dtype=np.uint8)


class ByName(Made):
    """Reads, and transforms by keyword."""

    def __init__(self, transform: Any) -> None:
        super().__init__(lambda index: (pixels(index), pixels(index)[..., 0]), SIZE)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        image, mask = self.make(index)
        transformed = self.transform(image=image, mask=mask)
        return transformed["image"], transformed["mask"], index


@pytest.mark.parametrize("workers", [0, 2])
def test_albumentations(workers: int) -> None:
    albumentations = pytest.importorskip("albumentations")
    from albumentations.pytorch import ToTensorV2

    parts = [albumentations.Resize(18, 18), albumentations.RandomCrop(16, 16), albumentations.HorizontalFlip()]
    parts += [albumentations.RandomBrightnessContrast(), albumentations.Normalize(), ToTensorV2()]
    dataset = ByName(albumentations.Compose(parts, seed=1))

    def augment(sample: Any) -> Any:
        transformed = dataset.transform(image=sample[0], mask=sample[1])
        return transformed["image"], transformed["mask"], sample[2]

    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
    first = check_same(loader)
    assert find_difference(first[0], first[len(first) // 2])
    check_same(loader, decode=lambda index: (*dataset.make(index), index), transform=augment)


@pytest.mark.parametrize("workers", [0, 2])
def test_monai(workers: int) -> None:
    monai = pytest.importorskip("monai")
    from monai import data, transforms

    def compose(*random: Any) -> Any:
        parts = [transforms.EnsureChannelFirstd("image", channel_dim=-1), transforms.ScaleIntensityd("image"), *random]
        return transforms.Compose(parts).set_random_state(5)

    flip, turn = transforms.RandFlipd("image", prob=0.5), transforms.RandRotate90d("image", prob=0.5)
    crops = transforms.RandSpatialCropSamplesd("image", (16, 16), num_samples=2, random_size=False)
    samples = [{"image": pixels(index), "label": index} for index in range(SIZE)]
    for transform in (compose(), compose(flip, turn), compose(crops))[workers // 2 :]:
        loader = data.DataLoader(data.Dataset(samples, transform), batch_size=4, shuffle=True, num_workers=workers)
        found = check_same(loader)
        assert isinstance(found[0]["image"], monai.data.MetaTensor)
    of_class = transforms.RandFlip(prob=0.5)  # with the generator that all of MONAI's transforms share
    arrays = [pixels(index) for index in range(SIZE)]
    check_same(DataLoader(data.Dataset(arrays, of_class), 4))


def test_tokenizers(tmp_path: Path) -> None:
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
        found = check_same(DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=collate))
        assert isinstance(found[0], transformers.BatchEncoding)


@pytest.mark.parametrize("workers", [0, 2])
def test_graphs(workers: int) -> None:
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
        found = check_same(loader.DataLoader(dataset, 4, shuffle=True, num_workers=workers, follow_batch=["y"]))
        assert isinstance(found[0], geometric.data.Batch)
