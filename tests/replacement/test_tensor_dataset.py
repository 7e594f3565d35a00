"""Random transforms are drawn as by workers, and applied in threads unless the batches depend on the workers."""

import random
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.support.pictures import assert_same, smooth
from vitmnist import from_dataloader
from vitmnist.data.images import to_tensor
from vitmnist.errors import DataError
from vitmnist.replacement.tensor_dataset import TensorTransformDataset
from vitmnist.replacement.tensor_transforms import build_tensor_pipeline
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.random_state import preserve_random_state, seed_generators

CLOSE = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))]
CLOSE_V2 = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))]
MIXED = [v1.RandomResizedCrop(130), v1.RandomHorizontalFlip(), v1.ColorJitter(0.3, 0.2), *CLOSE]


class Photos(Dataset[Any]):
    """Pictures of 150×140 pixels and labels. A transform makes one or two views of each.

    Args:
        small: index of a picture of 50×40 pixels.
        as_tensors: transform uint8 tensors.
    """

    def __init__(self, transforms: list[Any], views: int = 1, small: int = -1, as_tensors: bool = False) -> None:
        converted = for_tensors(transforms) if as_tensors else transforms
        self.transform, self.views = v1.Compose(deepcopy(converted)), views
        self.small, self.as_tensors = small, as_tensors

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        image: Any = smooth(index, (50, 40) if index == self.small else (150, 140))
        image = to_tensor(image) if self.as_tensors else image
        return tuple(self.transform(image) for _ in range(self.views)), {"label": index}


def for_tensors(transforms: list[Any]) -> list[Any]:
    """The transforms of torchvision for uint8 tensors, which draw and apply at once."""
    pipeline = build_tensor_pipeline(transforms)
    to_float = [pipeline.to_float] if pipeline.to_float else []
    return [*pipeline.transforms, *to_float, *(step for step in transforms if type(step).__name__ == "Normalize")]


def replaced(loader: DataLoader[Any]) -> DataLoader[Any]:
    made = from_dataloader(loader, "ram", transforms="tensor")
    assert isinstance(made.dataset, TensorTransformDataset)
    return made


def epochs(loader: Any, ends: tuple[int | None, ...] = (None, None)) -> list[Any]:
    """The batches of some epochs, and the states of the global generators after each. Epochs may be left early."""
    seed_generators(3, 0, 0)
    seen: list[Any] = []
    with preserve_random_state():
        for end in ends:
            batches = iter(loader)
            torch.rand(1)  # For example, the weights of a model
            for _ in range(end if end is not None else 100):
                if (batch := next(batches, None)) is None:
                    break
                seen.append(batch)
                torch.rand(1)  # The step draws too.
            del batches
            numpy_state = np.random.get_state()[1]
            seen.append([torch.get_rng_state(), torch.tensor(numpy_state.astype(np.int64)), random.random()])
    return seen


def check_equal(
    transforms: list[Any], views: int = 1, ends: tuple[int | None, ...] = (None, None), **options: Any
) -> None:
    """Assert that batches and generators equal those of torchvision's transforms of tensors in torch's workers."""

    def build(as_tensors: bool) -> DataLoader[Any]:
        generator = {"generator": torch.Generator().manual_seed(4)} if "generator" in options else {}
        dataset = Photos(transforms, views, as_tensors=as_tensors)
        return DataLoader(dataset, 4, **{"shuffle": True, **options, **generator})

    expected, ours = epochs(build(as_tensors=True), ends), replaced(build(as_tensors=False))
    assert_same(epochs(ours, ends), expected)
    needs_workers = options.keys() & {"persistent_workers", "in_order", "worker_init_fn"}
    needs_workers |= {"generator"} & options.keys() if options.get("shuffle", True) else set()
    assert isinstance(iter(ours), BackgroundMap) == ("num_workers" in options and not needs_workers)


def of_either_version(module: Any, close: list[Any]) -> dict[str, list[Any]]:
    """Transforms of torchvision's v1 or v2, followed by a conversion to floats."""
    return {
        "RandomResizedCrop": [module.RandomResizedCrop(130), *close],
        "RandomCrop": [module.RandomCrop(145, 4), *close],
        "flips": [module.RandomVerticalFlip(), module.RandomHorizontalFlip(0.3), module.PILToTensor()],
        "ColorJitter": [module.PILToTensor(), module.ColorJitter(0.4, 0.3, 0.2, 0.1), FLOAT],
        "RandomRotation": [module.PILToTensor(), module.RandomRotation(20, fill=7), FLOAT],
    }


FLOAT = v1.ConvertImageDtype(torch.float32)
OTHERS: dict[str, list[Any]] = {
    "padded by reflection": [v1.RandomCrop(145, (3, 5), padding_mode="reflect"), *CLOSE],
    "RandomCrop of the whole width": [v1.RandomCrop((130, 150)), v1.RandomHorizontalFlip(), *CLOSE],
    "between": [v1.RandomCrop(140), v1.Resize(135), v1.CenterCrop(134), v1.Grayscale(3), v1.RandomCrop(130), *CLOSE],
    "stored as tv_tensors": [v2.ToImage(), v2.RandomResizedCrop(130), *CLOSE_V2[1:]],
}
CASES = OTHERS | {
    f"{name}, {version}": transforms
    for version, module, close in (("v1", v1, CLOSE), ("v2", v2, CLOSE_V2))
    for name, transforms in of_either_version(module, close).items()
}


@pytest.mark.parametrize("transforms", CASES.values(), ids=CASES.keys())
def test_without_workers_batches_and_generators_match_torchvision(transforms: list[Any]) -> None:
    check_equal(transforms)


def asks_for_worker(worker: int) -> None:
    assert get_worker_info()


WORKERS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "2": ({"num_workers": 2}, (None, None, None)),
    "1, left early": ({"num_workers": 1, "prefetch_factor": 1, "drop_last": True}, (1, None, None)),
    "persistent, left early": ({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}, (2, 0, None)),
    "generator": ({"num_workers": 2, "generator": True}, (1, None)),
    "generator of workers": ({"num_workers": 2, "generator": True, "shuffle": False}, (1, None)),
    "without order": ({"num_workers": 1, "in_order": False}, (None,)),
    "worker_init_fn": ({"num_workers": 1, "worker_init_fn": asks_for_worker}, (None,)),
}


@pytest.mark.parametrize(("options", "ends"), WORKERS.values(), ids=WORKERS.keys())
def test_batches_and_generators_match_real_workers(options: dict[str, Any], ends: tuple[int | None, ...]) -> None:
    check_equal(MIXED, 2, ends, **options)


def test_a_dataloader_that_a_framework_builds_gets_the_same_batches_from_real_workers() -> None:
    ours = replaced(DataLoader(Photos(MIXED), 4, num_workers=2))
    again = DataLoader(ours.dataset, 4, num_workers=2, collate_fn=ours.collate_fn)
    like = type(ours)(ours.dataset, 4, num_workers=2, collate_fn=ours.collate_fn)
    expected = epochs(ours, (None,))
    for other in (again, like):
        assert_same(epochs(other, (None,)), expected)


def test_an_error_of_a_transform_names_the_sample() -> None:
    for workers in (0, 2):
        ours = replaced(DataLoader(Photos([v1.RandomCrop(130), *CLOSE], small=4), 4, num_workers=workers))
        with pytest.raises(DataError, match=r"^sample 4: the transform RandomCrop: get_params raised Value"):
            list(ours)


def test_stored_pictures_do_not_change_and_batches_are_new_and_contiguous() -> None:
    ours = replaced(DataLoader(Photos([v1.RandomHorizontalFlip(), v1.PILToTensor()]), 7, num_workers=2))
    before = ours.dataset.encoded_samples.blocks[0].clone()  # type: ignore[attr-defined]
    first, *others = ((image := batch[0][0]).is_contiguous() and image.zero_().data_ptr() for batch in list(ours))
    assert first
    assert len({first, *others}) == 3
    assert torch.equal(ours.dataset.encoded_samples.blocks[0], before)  # type: ignore[attr-defined]
