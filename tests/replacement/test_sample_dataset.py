"""Samples of any kind are stored unchanged, in memory that workers share or in a file, and collated as before."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from PIL.TiffImagePlugin import IFDRational
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torchvision import transforms as v1
from torchvision import tv_tensors

from tests.support.pictures import Pictures, assert_same, check_same, collect, draw
from tests.support.samples import Made, Pairs
from vitmnist import from_dataloader
from vitmnist.data import random_samples
from vitmnist.errors import DataError
from vitmnist.store import read_in_chunks
from vitmnist.store.image_codec import IMAGE_MODES
from vitmnist.store.samples import encode_samples, store_samples_in_file, store_samples_in_memory
from vitmnist.store.tree import find_difference

FLIP = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Encoding(UserDict[str, Any]):
    """Like the `BatchEncoding` of tokenizers."""


class Graph:
    """An object that has no `__eq__` and refers to itself."""

    def __init__(self, index: int) -> None:
        self.nodes, self.scale, self.itself = torch.rand(index % 5, 2, generator=seeded(index)), float("nan"), self


class Marked(Tensor):
    """A tensor with an attribute, like MONAI's `MetaTensor`."""


def seeded(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def boxes(index: int) -> Any:
    image = torch.rand(7 + index % 3, 9, 3, generator=seeded(index)).permute(2, 0, 1)  # Channels last in memory
    corners = torch.rand(index % 4, 4, generator=seeded(index))
    target = {
        "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(7, 9)),
        "area": [1.0] * (index % 4),
    }
    return image, {**target, "caption": None} if index % 5 == 0 else target


def marked(index: int) -> Marked:
    tensor = torch.full((1 + index % 3,), float(index)).as_subclass(Marked)
    tensor.spacing = index / 7
    return tensor


def picture(index: int) -> Any:
    return Image.new("P", (3, 1 + index % 2), index), index


def pad(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def encoded(samples: list[Tensor]) -> Encoding:
    return Encoding(ids=pad(samples), lengths=[len(sample) for sample in samples])


def transposed(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


class Ranks:
    """A collate function whose result has a constant shape but depends on the other samples of the batch."""

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([sample.sum() for sample in samples]).argsort()


MADE: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], Any]]] = {
    "padded text": (lambda index: torch.arange(1 + index % 7), pad),
    "padded text, nearly all of one length": (lambda index: torch.arange(3 if index == 37 else 7), pad),
    "more than was estimated by every fifth": (lambda index: torch.ones(99 if index % 5 else 1), list),
    "encodings": (lambda index: torch.arange(1 + index % 7), encoded),
    "detection": (boxes, transposed),
    "list": (lambda index: Encoding(a=torch.ones(index % 3), b={1, index}), list),
    "objects": (Graph, list),
    "subclass": (marked, list),
    "one subclass": (lambda index: torch.ones(2).as_subclass(Marked), torch.stack),
    "palettes": (picture, list),
    "ranks": (lambda index: torch.tensor([index * 7 % 5, index]), Ranks()),
    "text": (lambda index: "a" * index, default_collate),
    "nothing": (lambda index: None, list),
    "sparse": (lambda index: torch.eye(2 + index % 3).to_sparse() * index, list),
    "graphs with a sparse adjacency": (lambda index: Encoding(adj_t=torch.eye(2 + index % 3).to_sparse_csr()), list),
    "stacked sparse": (lambda index: torch.eye(2).to_sparse() * index, torch.stack),
    "requires_grad": (lambda index: torch.full((2,), float(index), requires_grad=True), list),
}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in MADE), ("detection", 2), ("requires_grad", 2)])
def test_batches_without_rows_equal_the_originals(kind: str, workers: int) -> None:
    make, collate = MADE[kind]
    dataset = Made(make)
    loader = DataLoader(dataset, 7, shuffle=True, num_workers=workers, collate_fn=collate)
    replaced, expected = from_dataloader(loader, "ram"), collect(loader)
    reads = len(dataset.reads)
    assert_same(collect(replaced), expected)
    assert len(dataset.reads) == reads


@pytest.mark.parametrize(
    "collate",
    [
        lambda samples: torch.stack([sample for sample in samples if sample is not None]),
        lambda samples: [samples[place] for place in range(6)],
        lambda samples: (samples[::2], samples[1::2], samples[1]),
    ],
    ids=["without None", "a fixed size", "pairs"],
)
def test_a_collate_function_may_fail_for_single_samples(collate: Any) -> None:
    dataset = Made(lambda index: None if index % 9 == 0 else torch.full((2,), float(index)))
    loader = DataLoader(dataset, 6, True, drop_last=True, collate_fn=collate)
    assert_same(collect(from_dataloader(loader, "ram")), collect(loader))


def test_few_short_samples_are_padded_as_in_the_original() -> None:
    """Chunks of samples are not padded together: each batch is padded to its own longest sample."""
    dataset = [torch.arange(7 if index in (11, 501, 503) else 10) for index in range(1000)]
    loader = DataLoader(dataset, batch_sampler=[[11, 501, 503], [1, 2]], collate_fn=pad)
    assert_same(collect(from_dataloader(loader, "ram")), collect(loader))


def test_a_rare_value_that_depends_on_its_batch_is_not_stored() -> None:
    data = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
    data[777, 0] = torch.nan

    def impute(samples: list[Tensor]) -> Tensor:
        batch = torch.stack(samples)
        return batch.where(~batch.isnan(), batch.nanmean(0))

    loader = DataLoader([*data], 32, shuffle=True, collate_fn=impute)
    assert_same(collect(from_dataloader(loader, "ram")), collect(loader))


def test_changes_of_a_sample_end_with_the_epoch() -> None:
    loader = from_dataloader(DataLoader(Made(boxes), 4, collate_fn=transposed), "ram")
    expected = collect(loader, 1)
    for images, targets in loader:
        images[0].fill_(7)
        targets[1]["boxes"].fill_(7)
        targets[1]["area"].append(3)
    assert_same(collect(loader, 1), expected)


def test_a_view_is_stored_without_the_rest_of_its_storage() -> None:
    waves = torch.rand(1000, 1000)
    for value in (waves[3], waves[3].numpy(), waves[:, 3]):
        stored = from_dataloader(DataLoader([Encoding(wave=value)], collate_fn=list), "ram").dataset
        assert stored.encoded_samples.blocks[0].nbytes < 6000
        assert find_difference(stored[0], Encoding(wave=value)) is None


def test_differences_are_found_in_objects() -> None:
    assert find_difference(Graph(3), Graph(3)) is None
    assert find_difference(Graph(3), Graph(8))
    assert find_difference(Encoding(a=1.0), Encoding(a=1))
    assert find_difference(marked(3), marked(6))
    assert find_difference(marked(3), marked(3)) is None
    assert find_difference(torch.zeros(2, 3), torch.zeros(3, 2).T) == "batch"
    assert find_difference(float("nan"), float("nan")) is None
    assert find_difference(torch.ones(2, requires_grad=True), torch.ones(2)) == "batch"
    assert find_difference(torch.eye(2).to_sparse(), torch.eye(2).to_sparse() * 2) == "batch"


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    class Local:
        pass

    def each_time(index: int) -> Any:
        class Each:
            pass

        return Each()

    value = Local()
    for make, name in (
        (lambda index: value, "Local"),
        (each_time, "Each"),
        (lambda index: (index, lambda: 0), r"<lambda>"),
    ):
        dataset = DataLoader(Made(make), 4, collate_fn=list)
        with pytest.raises(DataError, match=rf"^ram: a sample cannot be pickled \(.*{name}.*top level of"):
            from_dataloader(dataset, "ram")


@pytest.mark.parametrize("collate", [default_collate, list])
def test_samples_that_differ_without_a_generator_are_refused(collate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample that is no probe differs each time."""
    reads = count()
    dataset = Made(lambda index: torch.full((3,), float(next(reads) if index == 38 else index)), 43)
    monkeypatch.setattr(random_samples, "PROBES", 5)
    with pytest.raises(DataError, match=r"^ram: .* of samples .* draw from a generator that cannot be detected"):
        from_dataloader(DataLoader(dataset, 16, collate_fn=collate), "ram")


Pair = namedtuple("Pair", ["x", "y"])
VALUES: list[Any] = [
    *(0, -1, 2**63 - 1, -(2**63), True, False, 0.1, -0.0, float("inf"), "", "text", "é\udcff", b"\0\xff"),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.zeros((0, 3)), np.arange(6, dtype=np.uint16).reshape(2, 3)),
    *(np.arange(12).reshape(3, 4)[::-1, ::2], np.array(3.5), np.array([True]), np.complex64(1j)),
    *(torch.tensor(4), torch.zeros(0, 2), torch.rand(2, 3, dtype=torch.float64), torch.rand(3).bfloat16()),
    *(torch.tensor([float("nan"), 1.0]), torch.zeros(1, 2, 1, 2, 1), torch.tensor([True])),
    *(tv_tensors.Image(torch.zeros(3, 2, 2, dtype=torch.uint8)), tv_tensors.Mask(torch.ones(2, 2))),
    *({"a": [1, (2.0, "b")], "c": {}}, OrderedDict(x=1), [], ()),
    *(draw(3).convert("L").convert(mode).convert(mode) for mode in IMAGE_MODES if mode not in ("LAB", "I;16")),
    draw(3, "I;16"),
]  # fmt: skip


@pytest.mark.parametrize("in_file", [False, True])
def test_stored_values_are_unchanged(in_file: bool, tmp_path: Path) -> None:
    for value in VALUES:
        sample = {"value": value, "label": 7}
        chunks = [encode_samples([sample] * count, as_json=in_file) for count in (3, 1)]
        if in_file:
            stored = store_samples_in_file(lambda chunks=chunks: chunks, 4, tmp_path, None)
        else:
            stored = store_samples_in_memory(chunks, expected_nbytes=1)
        for sample in (stored.load(1), stored.load(3), stored.load(2, as_views=True)):
            assert sample["label"] == 7
            if isinstance(value, np.ndarray):
                assert (sample["value"].dtype, sample["value"].tolist()) == (value.dtype, value.tolist())
            else:
                assert find_difference(sample["value"], value) is None, value


class ReadMetadata:
    """Uses all that a transform can read of an image besides its pixels."""

    def __call__(self, image: Image.Image) -> Any:
        pixels = ImageOps.exif_transpose(image).convert("RGBA")
        return v1.functional.to_tensor(pixels), image.info, image.getpalette(None), image.has_transparency_data


@pytest.mark.parametrize("name", ["ram", "cache"])
@pytest.mark.parametrize("quantized", [False, True])
def test_stored_images_keep_their_metadata_and_palette(name: str, quantized: bool, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.XResolution] = 6, IFDRational(217, 3)
    (tmp_path / "images").mkdir()
    for file, image, metadata in (
        ("a.png", draw(1), {"transparency": (1, 2, 3), "dpi": (300, 300)}),
        ("b.png", draw(2, "L"), {"transparency": 7}),
        ("c.png", draw(3, "P"), {"transparency": bytes([0, 90, 255])}),
        ("d.gif", draw(4, "P"), {"transparency": 2, "comment": b"\xff'\0"}),
        ("e.jpg", draw(5), {"exif": exif, "icc_profile": bytes(range(256))}),
        ("f.tif", draw(6), {"dpi": (IFDRational(217, 3), 72)}),
    ):
        image.save(tmp_path / "images" / file, **metadata)
    quantize = [v1.Lambda(lambda image: image.convert("RGBA").quantize(9))] if quantized else []
    transform = v1.Compose([*quantize, v1.RandomHorizontalFlip(), ReadMetadata()])
    dataset = Pictures(tmp_path, transform, convert=None)
    check_same(partial(DataLoader, dataset, 3, True, collate_fn=list), loader=name, folder=str(tmp_path / "cache"))


def test_a_file_refuses_other_values_and_names_their_type() -> None:
    for value in (
        *(object(), np.array(["a"]), np.array([None]), torch.ones(2, requires_grad=True), torch.zeros(2).to_sparse()),
        *(Image.new("RGBa", (2, 2)), Path("file"), np.datetime64("2026-01-01"), np.str_("text"), Pair(1, 2)),
    ):
        named = "an image of mode RGBa" if isinstance(value, Image.Image) else f"an? {type(value).__name__}"
        with pytest.raises(DataError, match=f"a sample has {named}; a file stores only images, tens.*use ram"):
            encode_samples([{"value": value}], as_json=True)
    image = draw(1)
    image.info["path"] = Path("file")
    with pytest.raises(DataError, match=r"^a sample has a \w+Path; a file stores only"):
        encode_samples([image], as_json=True)


def look_at_dataset(worker: int) -> None:
    dataset = get_worker_info().dataset
    assert len(dataset.paths) if hasattr(dataset, "paths") else dataset.classes


@pytest.mark.parametrize(
    "method",
    [pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.needs("fork"))],
)  # spawn imports torch.
def test_unforked_workers_see_the_dataset(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_in_chunks, "available_cores", lambda: 1)
    for dataset, name in ((Pictures(folder, FLIP), "ram"), (Pairs(), "cache")):
        settings = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": look_at_dataset}
        unforked = DataLoader(dataset, 4, True, multiprocessing_context=method, **settings)
        replaced = from_dataloader(unforked, name, folder=str(tmp_path))
        assert replaced.num_workers == 1
        assert_same(collect(replaced, 1), collect(DataLoader(dataset, 4, True, **settings), 1))


SIZE = 24
