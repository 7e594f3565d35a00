"""Every loader keeps its contract on a real GPU, even while kernels and copies lag behind the host."""

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import NEEDS_CUDA
from tests.support.contract import check_contract
from tests.support.operations import PRESETS, preset_of
from vitmnist import make_loader
from vitmnist.augment.base import OPERATIONS
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.config.schema import Shuffle
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import TensorSet
from vitmnist.loaders.base import Batches, Loader

pytestmark = NEEDS_CUDA
LOADER_OPTIONS = {
    "disk": {"num_workers": 2},
    "ram": {},
    "gpu_slice": {},
    "cache": {},
    "prefetch of ram": {"base": "ram"},
    "prefetch of gpu_slice": {"base": "gpu_slice"},
    "prefetch of disk": {"base": "disk"},
}


@pytest.mark.parametrize("label", LOADER_OPTIONS)
def test_contract_on_the_gpu(label: str, tiny: Dataset, tmp_path: Path) -> None:
    name = label.partition(" ")[0]
    folder = {"folder": str(tmp_path)} if name == "cache" else {}
    check_contract(name, tiny.train, device="cuda", **LOADER_OPTIONS[label], **folder)


# Build these during collection, so that an operation or preset that cannot be built is found without a GPU.
AUGMENTS = {
    **{name: Compose([{"name": name}]) for name in OPERATIONS.members()},
    **{f"preset {name}": preset_of(name) for name in PRESETS if name != "none"},
}


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
def test_augmented_and_mixed_images_are_those_of_the_cpu(augment: Compose, cuda: torch.device) -> None:
    images = torch.randint(0, 256, (23, 3, 16, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data, results = TensorSet(images, torch.arange(23) % 5), []
    for device in (cuda, torch.device("cpu")):
        preprocess = Preprocess(data, augment, classes=5).to(device)
        (keys,) = preprocess.random_keys(EpochSampler(23, 23, 3, Shuffle.none), 1)
        batch = data.images.to(device), data.labels.to(device), keys
        result = preprocess.mix_batch(*batch) if preprocess.has_mixing else [preprocess(batch[0], keys)]
        results.append([tensor.cpu() for tensor in result])
    for ours, wanted in zip(*results, strict=True):
        if augment is AUGMENTS["preset trivial"]:
            # A crop that is rounded in another way can change a value of 8 bits, and equalize all values of the image.
            assert (ours - wanted).abs().mean() < 1e-3
        else:
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-4)


class SlowCopies(Loader):
    """Delays the stream of the copies, so that a batch is taken long before its copy is complete."""

    def __init__(self, base: Loader) -> None:
        super().__init__(base.sampler)
        self.base = base

    def batches(self, number: int, start: int) -> Batches:
        batches = self.base.epoch(number, start)
        for _ in range(len(self.sampler)):
            torch.cuda._sleep(20_000_000)
            yield next(batches)


def test_a_prefetched_batch_is_read_only_after_its_copy(tiny: Dataset, cuda: torch.device) -> None:
    """The copies lag behind the consumer, and then the consumer behind the copies. The sums must not change."""
    with make_loader("prefetch", tiny.train, batch_size=2, device=cuda, seed=3, base="ram") as loader:
        loader.base = SlowCopies(loader.base)
        for number in range(20):
            sums = []
            for images, _ in loader.epoch(number):
                sums.append(images.sum())
                torch.cuda._sleep(30_000_000 if number % 2 else 0)
                sums.append(images.sum())
                del images
            wanted = [tiny.train.images[indices].sum() for indices in loader.sampler.batch_indices(number)]
            assert [int(value) for value in sums] == [int(value) for value in wanted for _ in range(2)]
