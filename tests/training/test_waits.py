"""A step queues work for a GPU and never waits for it. Fake tensors simulate the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.test_step import OPTIMIZERS_UNDER_TEST
from vitmnist.augment.base import OPERATIONS
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.losses import LOSSES
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.optimizers import EMA, OPTIMIZERS
from vitmnist.training.batch import Batch
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepOptions

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a build of torch for CPUs cannot simulate a GPU")

CHANNELS = (0.5, 0.5, 0.5)
CUDA = torch.device("cuda", 0)
PER_IMAGE = [name for name in OPERATIONS.names() if name not in ("mixup", "cutmix")]


class NoCopies(TorchDispatchMode):
    """Refuses copies between host and device. A copy from pageable memory waits for all queued work."""

    is_on = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_on and function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            tensors = [leaf for leaf in tree_leaves([args, result]) if isinstance(leaf, torch.Tensor)]
            assert len({tensor.device.type for tensor in tensors}) == 1, "a copy between host and device"
        return result

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow copies within the block, and create new tensors on the device."""
        self.is_on = False
        with CUDA:
            yield
        self.is_on = True


@contextmanager
def refusing_waits() -> Iterator[NoCopies]:
    """Within the block, tensors have no values, so reading a value raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=True), NoCopies() as copies:
        yield copies


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("names", [PER_IMAGE, [*PER_IMAGE, "mixup"], ["cutmix"]], ids=["per image", "mixup", "cutmix"])
def test_no_step_waits_for_the_gpu(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The step averages weights and logs a norm. The test replaces the backward pass, which would need a GPU."""

    def backward(loss: Tensor) -> None:
        for parameter in step.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(Tensor, "backward", backward)
    augment = Compose([{"name": name} for name in names])
    preprocess = Preprocess(augment=augment, classes=10, mean=CHANNELS, std=CHANNELS)
    with refusing_waits() as copies:
        with copies.allowed():
            model = ViT(ViTOptions(patch_size=14, depth=1), (3, 28, 28), 10)
            optimizer = OPTIMIZERS.build({"name": "adamw", **OPTIMIZERS_UNDER_TEST["adamw"]}, model, True)
            values = LOSSES.with_defaults({"name": "cross_entropy", "label_smoothing": 0.1, "class_weights": [1] * 10})
            loss = LOSSES.build(values, torch.zeros(1, dtype=torch.int64), tuple("abcdefghij"), CUDA)
            parts = model, preprocess.to(CUDA), loss, optimizer, lambda step: 1.0
            step = TrainStep(*parts, 8, StepOptions(micro_batch=4), clip_norm=1.0, ema=EMA(model, 0.9))
            progress = EpochProgress(0, EpochSampler(23, 8, 0), CUDA, log_every=1)
            numbers = torch.zeros(8, dtype=torch.int64)
            images = torch.zeros(8, 3, 28, 28, dtype=torch.uint8)
        for _ in range(2):
            sums = step(Batch(images, numbers, 8, numbers), progress.record_step)
            progress.metrics.update(sums)
        assert sums["loss"].device == CUDA
