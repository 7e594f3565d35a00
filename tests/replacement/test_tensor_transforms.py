"""Random transforms of tensors in place of PIL images differ only by rounding."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.support.pictures import Pictures, assert_same, collect, replaced_as_well
from vitmnist import from_dataloader
from vitmnist.errors import ConfigError, DataError

FLIPS = [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip()]
NORMALIZE = v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
CLOSE = [v1.ToTensor(), NORMALIZE]

TRANSFORMS: dict[str, list[Any]] = {
    "v1": [*FLIPS, *CLOSE],
    "v2": [v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), NORMALIZE],
    "converted": [*FLIPS, v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), NORMALIZE],
    "resized before": [v1.Resize((20, 20)), *FLIPS, *CLOSE],
    "tensors before": [v1.Resize((20, 20)), v1.ToTensor(), *FLIPS, NORMALIZE],
}


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_batches_are_equal_where_nothing_is_resized(transforms: list[Any], folder: Path) -> None:
    for workers in (0, 1):

        def build(workers: int = workers) -> DataLoader[Any]:
            return DataLoader(Pictures(folder, deepcopy(v1.Compose(transforms))), 4, shuffle=True, num_workers=workers)

        original, replaced = replaced_as_well(build, transforms="tensor")
        assert_same(collect(replaced, 1), collect(original, 1))


class ToTensor:
    """Has the name of a transform of torchvision, but is another class."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image


class OwnCrop(v1.RandomCrop):  # type: ignore[misc]
    """A subclass may draw more numbers."""


class Joint(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.open(index), self.open(index))


START = [v1.RandomCrop(16), v1.PILToTensor()]
JOINT = [v2.RandomCrop(16), v2.PILToTensor()]
REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([*START, torch.clone], {}, "^transforms='tensor' applies .*, not clone as it is; use transforms='exact'"),
    ([*START, ToTensor()], {}, "not ToTensor as it is"),
    ([*START, OwnCrop(9)], {}, "not OwnCrop as it is"),
    ([*START, v1.RandomApply([v1.Grayscale(3)])], {}, "not RandomApply as it is"),
    ([*START, v1.RandomRotation(9, expand=True)], {}, "not RandomRotation as it is"),
    ([*START, v1.RandomCrop(145, pad_if_needed=True)], {}, "not RandomCrop as it is"),
    ([*START, v2.ToDtype(torch.float32)], {}, "not ToDtype as it is"),
    ([*START[:1], *CLOSE, v1.RandomVerticalFlip()], {}, "not RandomVerticalFlip as it is"),  # It gets floats.
    ([*FLIPS, *CLOSE], {"collate_fn": list}, "^transforms='tensor' is not for a collate_fn; use transforms='exact'"),
    ([v1.RandomResizedCrop(9, (0.9, 1.0), antialias=False), *CLOSE], {}, r"0: pixels differ by up to \d+ of 255 .*use"),
    (JOINT, {}, r"^transforms='tensor': .* gets more than an image; use transforms='exact'"),
]


@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")
@pytest.mark.parametrize(("transforms", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_transforms_that_do_not_take_tensors_are_refused(
    transforms: list[Any], options: dict[str, Any], message: str, folder: Path
) -> None:
    dataset = Joint(folder, v2.Compose(transforms)) if transforms is JOINT else Pictures(folder, v1.Compose(transforms))
    with pytest.raises(ConfigError, match=message):
        from_dataloader(DataLoader(dataset, 4, **options), "ram", transforms="tensor")


def test_datasets_of_a_loader_may_have_different_transforms(folder: Path) -> None:
    few, many = (v1.Compose([*FLIPS, v1.ToTensor(), v1.Normalize(mean, 0.5)]) for mean in (0.4, 0.6))
    original, replaced = replaced_as_well(
        lambda: DataLoader(ConcatDataset([Pictures(folder, few), Pictures(folder, many)]), 8, True), transforms="tensor"
    )
    assert_same(collect(replaced), collect(original))


def test_floats_are_not_rounded_to_the_integers_of_another_dataset(folder: Path) -> None:
    integers, floats = [v1.RandomCrop(16), v1.PILToTensor()], [v1.ToTensor(), v1.RandomCrop(16)]
    dataset = ConcatDataset([Pictures(folder, v1.Compose(transforms)) for transforms in (integers, floats)])
    replaced = from_dataloader(DataLoader(dataset, len(dataset)), "ram", transforms="tensor")
    with pytest.raises(DataError, match=r"images of a batch have different shapes or dtypes, .*float32 and .*uint8"):
        list(replaced)
