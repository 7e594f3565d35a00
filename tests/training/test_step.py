"""With any options, a step equals the plain step: exactly, or within the rounding that `TrainStep` documents."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests.support import steps
from tests.support.steps import BATCH, CUTMIX, MIXUP, SHIFT, make_loader, make_step, make_vit, train
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.config.schema import Precision
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.training.batch import PADDING_LABEL, Batch
from vitmnist.training.checks import check_weight_average
from vitmnist.training.loop import evaluate, train_epoch
from vitmnist.training.model_runner import ModelRunner
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep

AFFINE = Compose([{"name": "affine"}])


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))


def batch_of(data: Dataset, step: TrainStep, size: int) -> Batch:
    keys = next(step.preprocess.random_keys(EpochSampler(23, 23, 0), 0))
    return next(Batch(data.train.images, data.train.labels, size, keys).microbatches(size))


def check_gradient(step: TrainStep, data: Dataset, size: int, bound: float, smoothing: float = 0.0) -> None:
    """Compare the gradient with that of the mean cross-entropy by its formula, for the same weights and images."""
    plain, preprocess = copy.deepcopy(step.model), step.preprocess
    batch = batch_of(data, step, size)
    sums = step.forward_backward(batch)
    images, targets = batch.images, F.one_hot(batch.labels, 10)
    if preprocess.has_mixing:  # The batch is mixed as a whole. tests/augment compares mixed images with torchvision.
        images, targets = preprocess.mix_batch(images, batch.labels, batch.random_keys)
        assert size == 1 or not torch.equal(targets, targets.round())
    else:
        images = preprocess(images, batch.random_keys)
    logits = plain(images)
    targets = (1 - smoothing) * targets + smoothing / 10
    expected = -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()
    plain.zero_grad()
    expected.backward()
    assert steps.gradient_difference(step.model, plain) < bound
    assert float(sums["loss"]) / size == pytest.approx(float(expected.detach()), rel=bound)
    if bound < 1e-3:
        # A mixed image is correct if the prediction is its first label.
        assert int(sums["acc"]) == int((logits.argmax(1) == batch.labels).sum())


@pytest.mark.parametrize("augment", [SHIFT, MIXUP, CUTMIX], ids=["shift", "mixup", "cutmix"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["as they are", "padded"])
@pytest.mark.parametrize("micro_batch", [100, 3, 1])
@torch.compiler.set_stance("force_eager")  # A step that is to be compiled pads its batches.
def test_microbatches_give_the_same_gradient(
    tiny: Dataset, is_padded: bool, micro_batch: int, augment: Compose
) -> None:
    """This includes a short batch and a single image. Partners for mixing are drawn from the whole batch."""
    step = make_step(tiny, augment=augment, micro_batch=micro_batch, smoothing=0.1, compile=is_padded)
    assert step.runner.microbatch_size <= micro_batch
    for size in (BATCH, 7, 1):
        check_gradient(step, tiny, size, 1e-5, smoothing=0.1)


@pytest.mark.parametrize("augment", [SHIFT, MIXUP], ids=["shift", "mixup"])
def test_a_rank_without_a_valid_image_adds_nothing(tiny: Dataset, augment: Compose) -> None:
    step = make_step(tiny, augment=augment, smoothing=0.1)
    batch = batch_of(tiny, step, 1)
    sums = step.forward_backward(replace(batch, labels=torch.full_like(batch.labels, PADDING_LABEL)))
    assert not any(value.any() for value in sums.values())
    assert all(not parameter.grad.any() for parameter in step.model.parameters())


@pytest.mark.parametrize("augment", [SHIFT, AFFINE], ids=["shift", "affine"])
def test_bf16_gives_the_gradient_within_its_rounding(tiny: Dataset, augment: Compose) -> None:
    step, plain = (make_step(tiny, augment=augment, precision=name) for name in (Precision.bf16, Precision.fp32))
    check_gradient(step, tiny, BATCH, 0.02)
    plain.forward_backward(batch_of(tiny, plain, BATCH))
    assert steps.gradient_difference(step.model, plain.model) > 1e-5  # In float32, it would be smaller.
    assert all(value.dtype == value.grad.dtype == torch.float32 for value in step.model.parameters())


def test_fp16_gives_the_gradient_within_its_rounding_and_skips_a_step_that_overflows(tiny: Dataset) -> None:
    step, restored = (make_step(tiny, "adam", precision="fp16", clip_norm=1e4) for _ in range(2))
    plain = make_step(tiny, "adam")
    batch = batch_of(tiny, step, BATCH)
    plain.forward_backward(batch)
    step.forward_backward(batch)
    difference = steps.gradient_difference(step.model, plain.model)
    assert 1e-6 < difference < 0.01  # In float32, it would be below the lower bound.
    step.update()
    for scale, is_finite in ((1e30, False), (1024.0, True)):
        state = copy.deepcopy(step.state_dict())
        step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": scale}})
        for _ in range(2):  # A scale that overflows is halved after each step.
            step(batch)
        unchanged = [torch.equal(value, state["model"][name]) for name, value in step.model.state_dict().items()]
        assert not any(unchanged) if is_finite else all(unchanged)
        assert (step.pop_skipped_steps(), step.pop_skipped_steps()) == (0 if is_finite else 2, 0)
    assert step.completed_steps == 5
    restored.load_state_dict(plain.state_dict())  # The precision may change when a run is resumed.
    restored.load_state_dict(copy.deepcopy(step.state_dict()))
    for trained in (step, restored):
        trained(batch)
    assert restored.state_dict()["scaler"] == step.state_dict()["scaler"] != plain.state_dict()["scaler"]
    steps.check_same_weights(restored.model, step.model, tolerance=0)


def read_modes() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_only_the_products_of_a_step_use_tf32(tiny: Dataset) -> None:
    step, modes = make_step(tiny, precision="tf32"), []
    for module in step.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: modes.append(read_modes()))
            module.register_full_backward_hook(lambda *_: modes.append(read_modes()))
    before = read_modes()
    step(batch_of(tiny, step, BATCH))
    assert set(modes) == {("high", True)}
    modes.clear()
    sampler = EpochSampler(len(tiny.test), BATCH, shuffle="none")
    evaluate(step.model, LOADERS.build({"name": "ram"}, tiny.test, sampler, step.device), step.preprocess)
    assert set(modes) == {("highest", False)}
    assert read_modes() == before


@pytest.mark.parametrize(
    ("backend", "augment", "model"),
    # The backend `eager` only traces. Generating code for the transformer would take most of a minute.
    [
        ("eager", CUTMIX, make_vit(depth=1)),
        pytest.param("inductor", MIXUP, make_mlp(), marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
    ids=["eager, cutmix", "inductor, mixup"],
)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_code_gives_the_same_gradient_and_a_short_batch_compiles_nothing(
    tiny: Dataset, backend: str, augment: Compose, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    parts = {"augment": augment, "smoothing": 0.1, "compile": True}
    step, again = (make_step(tiny, model=copy.deepcopy(model), **parts) for _ in range(2))
    before, random = copy.deepcopy(step.model.state_dict()), torch.get_rng_state()
    batches = make_loader(tiny, "ram")
    step.compile_or_capture(batches)
    assert step.runner.options.compile
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    for size in (BATCH, 7, 1):
        check_gradient(step, tiny, size, 1e-5, smoothing=0.1)
    compiled = counters["stats"]["unique_graphs"]
    for compiled_step in (step, again):  # The second step has the same shapes, as in the next job of a sweep.
        compiled_step.compile_or_capture(batches)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    check_gradient(again, tiny, BATCH, 1e-5, smoothing=0.1)


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_versions_than_torch_keeps_are_compiled(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over many batch sizes exceeds torch's limit. Compiling does not change the buffers."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for size in (4, 3):
        model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, 10))
        step = make_step(tiny, model=model, augment=None, micro_batch=size, compile=True)
        before = copy.deepcopy(model.state_dict())
        step.compile_or_capture(make_loader(tiny, "ram"))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        check_gradient(step, tiny, size, 1e-5)


@pytest.mark.parametrize(
    ("micro_batch", "augment"),
    [(None, MIXUP), (4, SHIFT), (3, MIXUP)],
    ids=["whole, mixup", "even, shift", "uneven, mixup"],
)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_batch_normalisation_sees_no_padding(
    tiny: Dataset, micro_batch: int | None, augment: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, 10))
    models, batches = (plain, copy.deepcopy(plain)), make_loader(tiny, "ram")
    for model, is_compiled in zip(models, (False, True), strict=True):
        step = make_step(tiny, model=model, augment=augment, micro_batch=micro_batch, compile=is_compiled)
        step.compile_or_capture(batches)
        train(step, batches, 2)
    for name, value in models[1].state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", steps.OPTIMIZERS_UNDER_TEST)
def test_a_fused_optimizer_gives_the_same_weights(tiny: Dataset, optimizer: str) -> None:
    ours, theirs = (make_step(tiny, optimizer, fused=fused) for fused in (True, False))
    for step in (ours, theirs):
        train(step, make_loader(tiny, "ram"))
    assert [bool(step.optimizer.param_groups[0]["fused"]) for step in (ours, theirs)] == [True, False]
    steps.check_same_weights(ours.model, theirs.model)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"micro_batch": None}], ids=str)
def test_gradients_are_clipped_before_the_optimizer_and_after_they_are_logged(tiny: Dataset, options: dict) -> None:
    norms = {}
    for clip_norm in (None, 1e-3):
        step = make_step(tiny, clip_norm=clip_norm, **options)
        progress = EpochProgress(0, EpochSampler(23, BATCH, 3), step.device, log_every=1)
        progress.record_step(step, step.forward_backward(batch_of(tiny, step, BATCH)))
        step.update()
        norms[clip_norm] = progress.logged_steps()[0]["grad_norm"], float(step.gradient_norm())
    (logged, unclipped), (logged_before_clipping, clipped) = norms[None], norms[1e-3]
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert logged_before_clipping == logged == unclipped > 1e-2


def test_the_ema_follows_its_formula(tiny: Dataset) -> None:
    step = make_step(tiny, decay=0.5)
    weights = [next(step.model.parameters()).detach().clone()]
    for batch in step.batches(make_loader(tiny, "ram"), 0):
        step(batch)
        weights.append(next(step.model.parameters()).detach().clone())
    expected = weights[0]
    for count, newest in enumerate(weights[1:], start=1):
        keep = min(0.5, count / (9 + count))
        expected = keep * expected + (1 - keep) * newest
    torch.testing.assert_close(next(step.evaluated_model.parameters()), expected)
    assert not torch.equal(weights[-1], expected)
    assert not any(parameter.requires_grad for parameter in step.evaluated_model.parameters())


class ScheduleFree(torch.optim.SGD):
    """As the optimizers of schedulefree: trains and evaluates different weights, and counts its steps in the group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0] |= {"count": 0, "is_training": False}

    def train(self) -> None:
        self._set_mode(True)

    def eval(self) -> None:
        self._set_mode(False)

    @torch.no_grad()
    def _set_mode(self, is_training: bool) -> None:
        (group,) = self.param_groups
        if group["is_training"] != is_training:
            torch._foreach_mul_(group["params"], 1.1 if is_training else 1 / 1.1)
        group["is_training"] = is_training

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        assert group["is_training"]
        group["count"] += 1
        group["lr"] /= group["count"]
        super().step()


class CountingLoss(nn.Module):
    """A loss that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("stop", ["in training", "in evaluation", "after an epoch"])
def test_the_states_of_a_loss_and_of_a_parameter_group_are_restored(tiny: Dataset, stop: str) -> None:
    def make() -> TrainStep:
        model = make_mlp()
        runner = ModelRunner(model, Preprocess(tiny.train), CountingLoss(), BATCH)
        return TrainStep(runner, ScheduleFree(model), lambda step: 1.0)

    whole, first, second = (make() for _ in range(3))
    loader = make_loader(tiny, "ram")
    batches = list(whole.batches(loader, 0))
    train(whole, loader, 2)
    progress = EpochProgress(0, loader.sampler, first.device)
    for batch in batches[: 2 if stop == "in training" else 3]:
        progress.record_step(first, first(batch))
    if stop != "in training":
        first.eval_mode()
    with first.preserved_state():
        first.train_mode()
        first(batches[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    if stop != "after an epoch":
        train_epoch(second, loader, progress)
    train(second, loader, 1, first=1)
    assert second.optimizer.param_groups[0]["count"] == second.runner.loss.calls == 6
    steps.check_same_weights(second.model, whole.model, tolerance=0)


def test_an_optimizer_that_averages_the_weights_needs_no_other_average(tiny: Dataset) -> None:
    step = make_step(tiny, decay=0.9)
    check_weight_average(step)
    step.optimizer = ScheduleFree(step.model)
    with pytest.raises(ConfigError, match=r"^optimizer: averages the weights itself; set ema_decay=null"):
        check_weight_average(step)
    model = nn.Sequential(nn.BatchNorm2d(1), make_mlp())
    runner = ModelRunner(model, Preprocess(tiny.train), CountingLoss(), BATCH)
    with pytest.raises(ConfigError, match=r"^optimizer: averages the weights itself; "):
        check_weight_average(TrainStep(runner, ScheduleFree(model), lambda step: 1.0))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.members())
def test_a_restored_step_continues_to_the_bit_and_in_a_longer_run_at_its_rates(tiny: Dataset, optimizer: str) -> None:
    """The model has a parameter without a gradient, for which the optimizer has no state."""

    def model() -> nn.Module:
        vit = make_vit()
        vit.unused = nn.Parameter(torch.ones(3))
        return vit

    whole, first, second = (make_step(tiny, optimizer, decay=0.9, model=model()) for _ in range(3))
    long, longer = (make_step(tiny, optimizer, steps=18, model=model()) for _ in range(2))
    batches = make_loader(tiny, "ram")
    train(whole, batches, 2)
    train(long, batches, 1)
    train(first, batches, 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    longer.load_state_dict(copy.deepcopy(first.state_dict()) | {"ema": None})
    for step in (second, long, longer):
        train(step, batches, 1, first=1)
    assert longer.lr == long.lr != second.lr
    steps.check_same_weights(second.model, whole.model, tolerance=0)
    steps.check_same_weights(second.evaluated_model, whole.evaluated_model, tolerance=0)
