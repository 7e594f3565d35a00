"""The step of a mixed batch: its gradient is that of both labels, however the batch is cut, padded or replayed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.training.test_step import (
    BATCH,
    CPU,
    batch_of,
    check_same_weights,
    gradient_difference,
    make_loader,
    make_step,
    make_vit,
    train,
)
from vitmnist.data.augment import Compose
from vitmnist.data.datasets import Dataset
from vitmnist.runtime.device import Accelerator
from vitmnist.training.cuda_graph import capture_step
from vitmnist.training.step import IGNORED, TrainStep

MIXES = {name: Compose([{"name": "shift", "pixels": 2}, {"name": name}]) for name in ("mixup", "cutmix")}


def check_mixed_gradient(step: TrainStep, data: Dataset, size: int) -> None:
    """Compare with the loss of both labels, written out for the whole batch."""
    plain = copy.deepcopy(step.model)
    images, labels, keys = batch_of(data, step, size)
    loss, correct = step.forward_backward(images, labels, keys, size)
    mixed, partner_labels, weights = step.preprocess.mixed(images, labels, keys)
    logits = plain(mixed)
    own, others = (
        F.cross_entropy(logits, one, reduction="none", label_smoothing=0.1) for one in (labels, partner_labels)
    )
    expected = (weights * own + (1 - weights) * others).mean()
    plain.zero_grad()
    expected.backward()
    assert gradient_difference(step.model, plain) < 1e-5
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert int(correct) == int((logits.argmax(1) == labels).sum())  # the image's own label counts
    if size > 1:
        assert (partner_labels != labels).any()


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("size", [BATCH, 7, 1], ids=["full batch", "short batch", "one image"])
@pytest.mark.parametrize("pad", [False, True], ids=["as it is", "padded"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_microbatches_have_the_partners_of_the_whole_batch(
    tiny: Dataset, size: int, pad: bool, micro_batch: int | None, name: str
) -> None:
    step = make_step(tiny, augment=MIXES[name], micro_batch=micro_batch, smoothing=0.1)
    step.pad = pad
    check_mixed_gradient(step, tiny, size)


@pytest.mark.parametrize("loader", ["ram", "gpu_slice", "disk"])
@pytest.mark.parametrize("name", MIXES)
def test_replay_is_the_eager_step_also_of_a_short_batch(tiny: Dataset, name: str, loader: str) -> None:
    """Behind the last image of a short batch, the graph finds images and keys of the batch before."""
    eager, captured = (make_step(tiny, augment=MIXES[name]) for _ in range(2))
    batches = make_loader(tiny, loader)
    expected = train(eager, batches)
    capture_step(captured, batches, Accelerator(CPU))
    metrics = train(captured, batches)
    assert [one["train_loss"] for one in metrics] == pytest.approx([one["train_loss"] for one in expected], rel=1e-4)
    assert [one["train_acc"] for one in metrics] == [one["train_acc"] for one in expected]
    check_same_weights(captured.model, eager.model)


def test_a_rank_without_a_valid_image_adds_nothing(tiny: Dataset) -> None:
    step = make_step(tiny, augment=MIXES["mixup"])
    images, labels, keys = batch_of(tiny, step, 1)
    loss, correct = step.forward_backward(images, torch.full_like(labels, IGNORED), keys, BATCH)
    assert float(loss) == int(correct) == 0
    assert all(not parameter.grad.any() for parameter in step.model.parameters())


@pytest.mark.slow
def test_compiled_is_the_gradient_of_the_mixed_batch(tiny: Dataset) -> None:
    torch.compiler.reset()
    step = make_step(tiny, model=make_vit(depth=1), augment=MIXES["mixup"], smoothing=0.1)
    images, labels, keys = batch_of(tiny, step, BATCH)
    step.compile((images, labels), keys)
    for size in (BATCH, 7, 1):
        check_mixed_gradient(step, tiny, size)
