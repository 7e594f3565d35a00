"""`disk` reads image files in threads: the batches of all loaders, in bounded memory, without a process."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.contract import check_contract
from tests.support.pictures import smooth
from tests.support.processes import becomes_true
from vitmnist import load_dataset, make_loader
from vitmnist.auditing import find_leftovers, find_running
from vitmnist.data.datasets.base import Split
from vitmnist.data.images import Pixels
from vitmnist.errors import ConfigError, DataError
from vitmnist.loaders.base import Loader
from vitmnist.runtime import cpu

IMAGES, BATCH_SIZE = 24, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PNG files, and of JPEG files that are at least twice as large as the small images."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        path = folder / "all" / f"class{number % 2}" / f"{number}.{'png' if number % 5 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        smooth(number, (150 + number, 110)).save(path)
    return folder


def load(folder: Path, **options: Any) -> Split:
    options = {"size": 16, "mode": "rgb", "test_share": 0, **options}
    return load_dataset("image_folder", root=str(folder / "root"), path=str(folder / "all"), **options).train


@pytest.fixture
def split(folder: Path) -> Split:
    return load(folder)


def disk(split: Split, **options: Any) -> Loader:
    return make_loader("disk", split, **{"batch_size": BATCH_SIZE, "device": "cpu", "seed": 0, "threads": 2, **options})


def watched(split: Split, watch: Callable[[str], object]) -> Split:
    """The split, with a function that is called with the name of each file before it is read."""

    def read(path: Path) -> Pixels:
        watch(path.name)
        return split.files.read(path)

    return replace(split, files=replace(split.files, read=read))


@pytest.mark.parametrize("given", [{"size": 16}, {"size": 16, "mode": "grey"}, {"size": 100, "mode": "grey"}])
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3, "prefetch_factor": 1}])
def test_disk_meets_the_contract_with_image_files(folder: Path, given: dict[str, Any], options: dict[str, Any]) -> None:
    check_contract("disk", load(folder, **given), **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prefetch", {"base": "disk"}),
        ("auto", {"candidates": ["disk"], "batches": 1}),
        pytest.param("disk", {"num_workers": 1}, marks=pytest.mark.slow),
    ],
)
def test_other_loaders_meet_the_contract_with_image_files(split: Split, name: str, options: dict[str, Any]) -> None:
    check_contract(name, split, **options)


@pytest.mark.parametrize(
    ("size", "layout"), [(16, torch.contiguous_format), (100, torch.channels_last), (100, torch.contiguous_format)]
)
def test_the_bytes_and_their_layout_match_ram(folder: Path, size: int, layout: torch.memory_format) -> None:
    """An image folder has large images with their channels last, and another dataset may have contiguous ones."""
    split = load(folder, size=size)
    assert split.images.is_contiguous(memory_format=torch.channels_last if size == 100 else layout)
    split = replace(split, images=split.images.contiguous(memory_format=layout))
    with disk(split) as files, make_loader("ram", split, batch_size=BATCH_SIZE, device="cpu", seed=0) as ram:
        for (images, labels), (expected, expected_labels) in zip(files.epoch(3), ram.epoch(3), strict=True):
            assert images.dtype == torch.uint8
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)
            assert images.stride() == expected.stride()
            assert images.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.device("meta")])
def test_batches_are_equal_in_inference_mode_and_with_another_default_device(split: Split, mode: Any) -> None:
    with mode, disk(split) as loader:
        loaded = [images for images, _ in loader.epoch(0)]
    with disk(split) as loader:
        assert all(map(torch.equal, loaded, [images for images, _ in loader.epoch(0)]))


@pytest.mark.parametrize("size", [16, 100])
def test_at_most_two_batches_are_read_ahead(folder: Path, size: int) -> None:
    read: list[str] = []
    with disk(watched(load(folder, size=size), read.append)) as loader:
        batches = loader.epoch(0)
        next(batches)
        assert becomes_true(lambda: len(read) >= 3 * BATCH_SIZE)
        time.sleep(0.2)
        assert len(read) == (1 + loader.batches_ahead) * BATCH_SIZE
        assert loader.batches_ahead == 2


def test_an_unreadable_image_is_an_error_in_its_batch(split: Split) -> None:
    names = [*split.files.names]
    names[9] = "gone.jpg"
    broken = replace(split, files=replace(split.files, names=names))
    before = find_running()
    with disk(broken, shuffle="none") as loader:
        delivered = 0
        with pytest.raises(DataError, match=r"gone\.jpg: cannot be read as an image: No such file"):  # noqa: PT012
            for images, _ in loader.epoch(0):
                assert torch.equal(images, split.images[delivered * BATCH_SIZE :][:BATCH_SIZE])
                delivered += 1
        assert delivered == 9 // BATCH_SIZE
        assert len([*loader.epoch(0, start=3)]) == IMAGES // BATCH_SIZE - 3
    assert not find_leftovers(before)


PIXELS = {
    r"uint8 \(3, 16, 16\)": lambda pixels: pixels.transpose(2, 0, 1),
    r"uint8 \(16, 16, 1\)": lambda pixels: pixels[:, :, 0],
    r"float64 \(16, 16, 3\)": lambda pixels: pixels / 255,
}


@pytest.mark.parametrize("wrong", PIXELS)
def test_pixels_of_another_shape_or_dtype_are_an_error_that_names_the_file(split: Split, wrong: str) -> None:
    files = replace(split.files, read=lambda path: PIXELS[wrong](split.files.read(path)))
    with disk(replace(split, files=files), shuffle="none") as loader:
        message = rf"{split.files.names[0]}: is read as {wrong}, and must be uint8 \(16, 16, 3\)"
        with pytest.raises(DataError, match=message):
            next(loader.epoch(0))


def test_a_reader_of_grey_images_may_leave_out_the_channel(folder: Path) -> None:
    split = load(folder, mode="grey")
    files = replace(split.files, read=lambda path: split.files.read(path)[:, :, 0])
    with disk(replace(split, files=files), shuffle="none") as loader:
        assert torch.equal(torch.cat([images for images, _ in loader.epoch(0)]), split.images)


def test_threads_and_workers_follow_the_options_and_the_cores(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_cores", lambda: 6)
    assert disk(split, threads="auto").resolved_options == {"threads": 6}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert disk(split, threads="auto").resolved_options == {"threads": 1}
    assert disk(split, threads=5).resolved_options == {"threads": 5}
    explicit = disk(split, threads="auto", num_workers=3)
    assert (explicit.resolved_options, explicit.num_workers) == ({"num_workers": 3}, 3)
    tensors = make_loader("disk", (torch.zeros(9, 1), torch.zeros(9)), batch_size=2, device="cpu", seed=0)
    assert (tensors.resolved_options, tensors.num_workers) == ({"num_workers": 2}, 2)
    with pytest.raises(ConfigError, match=r"^threads=0: must be at least 1"):
        disk(split, threads=0)
    with pytest.raises(ConfigError, match=r"^num_workers=many: must be int \| auto"):
        disk(split, num_workers="many")
