"""However a step is computed, it is the plain step: exactly, or within the rounding that its docstring states."""

from __future__ import annotations

import copy
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.config.schema import Precision, Shuffle, TrainerConfig
from vitmnist.data.augment import AUGMENTS, Augment
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS, Loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.ema import EMA
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.device import Accelerator
from vitmnist.training import loop
from vitmnist.training.fast import StepConfig, decide, time_pieces
from vitmnist.training.step import Gradient, Step

CPU = torch.device("cpu")
SHIFT = AUGMENTS.build({"name": "shift", "pixels": 2})
AFFINE = AUGMENTS.build(AUGMENTS.complete({"name": "affine"}))
BATCH = 8  # 23 images: two whole batches and a short one of 7


def make_vit(depth: int = 2) -> ViT:
    torch.manual_seed(0)
    return ViT(ViTOptions(patch_size=14, dim=16, depth=depth, heads=2, head_dim=8, mlp_dim=16), (1, 28, 28), 10)


def batch_of(tiny: Dataset, preprocess: Preprocess, size: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = next(preprocess.keys(EpochSampler(23, 23, 0), 0))
    return tiny.train.images[:size], tiny.train.labels[:size], keys[:size]


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The norm of the gradients' difference, relative to the gradient's."""
    pairs = [(mine.grad, other.grad) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)]
    apart = torch.cat([(mine - other).flatten() for mine, other in pairs]).norm()
    return float(apart / torch.cat([other.flatten() for _, other in pairs]).norm())


def check_gradient(gradient: Gradient, tiny: Dataset, size: int, bound: float, depth: int = 2) -> None:
    """That it is the gradient of the mean loss, written out, of a model with the same weights."""
    plain = make_vit(depth)
    images, labels, keys = batch_of(tiny, gradient.preprocess, size)
    loss, right = gradient(images, labels, keys)
    logits = plain(gradient.preprocess(images, keys))
    expected = F.cross_entropy(logits, labels, label_smoothing=gradient.label_smoothing)
    expected.backward()
    assert difference(gradient.model, plain) < bound
    assert float(loss) == pytest.approx(float(expected.detach()), rel=bound)
    if bound < 1e-3:
        assert int(right) == int((logits.argmax(1) == labels).sum())


@pytest.mark.parametrize("size", [BATCH, 7, 1], ids=["whole batch", "short batch", "one image"])
@pytest.mark.parametrize("padding", [False, True], ids=["as it is", "filled up"])
@pytest.mark.parametrize("micro_batch", [None, BATCH, 4, 3, 1, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_pieces_make_the_gradient_of_the_batch(
    tiny: Dataset, size: int, padding: bool, micro_batch: int | None, smoothing: float
) -> None:
    gradient = Gradient(make_vit(), Preprocess(tiny.train, SHIFT), BATCH, micro_batch, label_smoothing=smoothing)
    gradient.padding = padding
    assert gradient.piece <= (micro_batch or BATCH)
    check_gradient(gradient, tiny, size, 1e-5)


def test_pieces_are_even(tiny: Dataset) -> None:
    pieces = {size: Gradient(make_vit(), Preprocess(tiny.train), 500, size).piece for size in (500, 400, 250, 200, 130)}
    assert pieces == {500: 500, 400: 250, 250: 250, 200: 167, 130: 125}


@pytest.mark.parametrize("augment", [SHIFT, AFFINE], ids=["shift", "affine"])
def test_bf16_is_the_gradient_within_its_rounding(tiny: Dataset, augment: Augment) -> None:
    gradient = Gradient(make_vit(), Preprocess(tiny.train, augment), BATCH, precision=Precision.bf16)
    check_gradient(gradient, tiny, BATCH, 0.02)
    plain = Gradient(make_vit(), Preprocess(tiny.train, augment), BATCH)
    plain(*batch_of(tiny, plain.preprocess, BATCH))
    assert difference(gradient.model, plain.model) > 1e-5  # or it was computed in float32
    assert all(value.dtype == value.grad.dtype == torch.float32 for value in gradient.model.parameters())


@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_is_the_gradient_and_a_short_batch_compiles_nothing(tiny: Dataset) -> None:
    gradient = Gradient(make_vit(depth=1), Preprocess(tiny.train, SHIFT), BATCH, 4, label_smoothing=0.1)
    before = copy.deepcopy(gradient.model.state_dict())
    random = torch.get_rng_state()
    assert gradient.compile(*batch_of(tiny, gradient.preprocess, BATCH)) is None
    assert gradient.compiled
    assert gradient.compile_s > 0
    assert all(torch.equal(value, before[name]) for name, value in gradient.model.state_dict().items())
    assert all(value.grad is None for value in gradient.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    for size in (BATCH, 7, 1):
        check_gradient(gradient, tiny, size, 1e-5, depth=1)
    assert gradient.compile(*batch_of(tiny, gradient.preprocess, BATCH)) is None  # it is there already


class Branching(nn.Module):
    """Asks a value of the device in the middle of its work, which no compiler can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.linear(images.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


def test_what_cannot_be_compiled_says_why_and_runs_plainly(tiny: Dataset) -> None:
    models = [Branching(), Branching()]
    models[1].load_state_dict(models[0].state_dict())
    ours, plain = (Gradient(model, Preprocess(tiny.train, SHIFT), BATCH) for model in models)
    reason = ours.compile(*batch_of(tiny, ours.preprocess, BATCH))
    assert reason is not None
    assert "branch" in reason.lower()
    assert not ours.compiled
    assert ours.compile_s == 0
    for gradient in (ours, plain):
        gradient(*batch_of(tiny, gradient.preprocess, 7))
    assert difference(*models) == 0


class Small(nn.Module):
    """A model for which the device has memory for a number of images at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.vit, self.most = make_vit(), most

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nDetails.")
        return self.vit(images)


def test_out_of_memory_halves_the_pieces_and_says_so(tiny: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    gradient = Gradient(Small(3), Preprocess(tiny.train, SHIFT), BATCH, BATCH)
    with caplog.at_level("WARNING"):
        check_gradient(gradient, tiny, BATCH, 1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        f"out of memory (CUDA out of memory. Tried to allocate 20.00 GiB.); going on with trainer.micro_batch={size}"
        for size in (4, 2)
    ]
    check_gradient(gradient, tiny, 7, 1e-5)
    assert gradient.micro_batch == 2


def test_a_whole_batch_stays_whole_and_one_image_is_the_least(tiny: Dataset) -> None:
    for model, micro_batch in ((Small(3), None), (Small(0), BATCH)):
        gradient = Gradient(model, Preprocess(tiny.train, SHIFT), BATCH, micro_batch)
        with pytest.raises(torch.OutOfMemoryError):
            gradient(*batch_of(tiny, gradient.preprocess, BATCH))


# --- a whole step -----------------------------------------------------------------------------------------------------


OPTIMIZER_OPTIONS = {
    "adam": {"lr": 0.003, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 0.003, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


def make_step(
    tiny: Dataset,
    optimizer: str = "adamw",
    fused: bool = True,
    decay: float | None = None,
    device: torch.device = CPU,
    precision: Precision = Precision.fp32,
) -> Step:
    """A step of a cycle of nine."""
    model = make_vit().to(device)
    built = OPTIMIZERS.build({"name": optimizer, **OPTIMIZER_OPTIONS[optimizer]}, model, fused)
    one_cycle = {"name": "one_cycle", "warmup": 0.3, "start_factor": 0.04, "end_factor": 1e-4}
    return Step(
        Gradient(model, Preprocess(tiny.train, SHIFT).to(device), BATCH, 4, precision),
        built,
        SCHEDULES.build(one_cycle, built, 9),
        EMA(model, decay) if decay else None,
    )


def make_loader(tiny: Dataset, name: str, shuffle: Shuffle = Shuffle.sample, device: torch.device = CPU) -> Loader:
    return LOADERS.build(LOADERS.complete({"name": name}), tiny.train, EpochSampler(23, BATCH, 3, shuffle), device)


def train(step: Step, loader: Loader, epochs: int = 3, first: int = 0) -> list[loop.PassFigures]:
    device = step.gradient.device
    return [
        loop.train_epoch(step, loader, loop.TrainingPass(epoch, len(loader), device, 2), device)
        for epoch in range(first, first + epochs)
    ]


def check_same_weights(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-4) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZER_OPTIONS)
def test_a_fused_optimizer_is_the_optimizer(tiny: Dataset, optimizer: str) -> None:
    steps = [make_step(tiny, optimizer, fused) for fused in (True, False)]
    for step in steps:
        train(step, make_loader(tiny, "ram"))
    assert steps[0].optimizer.param_groups[0]["fused"] is True
    assert not steps[1].optimizer.param_groups[0]["fused"]
    check_same_weights(steps[0].model, steps[1].model)


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("optimizer", OPTIMIZER_OPTIONS)
@pytest.mark.parametrize(
    ("loader", "shuffle"),
    [("ram", Shuffle.sample), ("gpu_slice", Shuffle.sample), ("gpu_slice", Shuffle.batch), ("disk", Shuffle.sample)],
)
def test_replay_is_the_eager_step_over_a_changing_rate(
    tiny: Dataset, loader: str, shuffle: Shuffle, optimizer: str, decay: float | None
) -> None:
    """Three epochs of a whole cycle, each with a short last batch, recorded after the first of them."""
    eager, captured = make_step(tiny, optimizer, decay=decay), make_step(tiny, optimizer, decay=decay)
    batches = make_loader(tiny, loader, shuffle)
    expected = train(eager, batches)
    figures = train(captured, batches, epochs=1)
    captured.capture(batches, Accelerator(CPU))
    for epoch in (1, 2):
        current = loop.TrainingPass(epoch, len(batches), CPU, watch_every=2)
        figures.append(loop.train_epoch(captured, batches, current, CPU))
    assert [figure.loss for figure in figures] == pytest.approx([figure.loss for figure in expected], rel=1e-4)
    assert [figure.accuracy for figure in figures] == [figure.accuracy for figure in expected]
    check_same_weights(captured.model, eager.model)
    check_same_weights(captured.evaluated, eager.evaluated)
    assert captured.rate == eager.rate  # a number, with which the schedule goes on computing
    assert {group["lr"] for group in captured.optimizer.param_groups} == {captured.rate}
    assert len({figure.lr for figure in current.watched()}) == len(current.watched()) > 0
    assert captured.gradient.compile_s > 0
    assert captured.optimizer.state_dict()["param_groups"] == eager.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("before", [0, 1], ids=["before the first step", "in the middle"])
def test_recording_changes_nothing(tiny: Dataset, before: int) -> None:
    step, batches = make_step(tiny, decay=0.9), make_loader(tiny, "gpu_slice")
    train(step, batches, before)

    def state() -> list[Tensor]:
        models = [*step.model.state_dict().values(), *step.evaluated.state_dict().values()]
        states = step.optimizer.state_dict()["state"].values()
        return [value.clone() for value in (*models, *(value for state in states for value in state.values()))]

    left, rate = state(), step.rate
    step.capture(batches, Accelerator(CPU))
    now = state()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(now, left, strict=before > 0))
    assert all(not value.any() for value in now[len(left) :])  # an optimizer that has seen no step
    assert step.rate == rate


class Unrecordable(Accelerator):
    """A device on which the step does something that cannot be recorded."""

    def capture(self, work: Callable[[], object], warm_up: int) -> Callable[[], object]:
        super().capture(work, warm_up)
        raise RuntimeError("operation not permitted when stream is capturing\nDetails.")


def test_a_step_that_cannot_be_recorded_goes_on_as_before(tiny: Dataset) -> None:
    step, eager, batches = make_step(tiny, decay=0.9), make_step(tiny, decay=0.9), make_loader(tiny, "gpu_slice")
    with pytest.raises(RuntimeError, match="not permitted"):
        step.capture(batches, Unrecordable(CPU))
    assert not step.gradient.padding
    for one in (step, eager):
        train(one, batches)
    check_same_weights(step.model, eager.model)
    check_same_weights(step.evaluated, eager.evaluated)


def test_the_gradient_is_watched_before_an_optimizer_writes_into_it(tiny: Dataset) -> None:
    """As torch's own momentum after Nesterov does on a GPU."""
    step = make_step(tiny)
    seen: list[float] = []
    step.optimizer.register_step_pre_hook(lambda *_: [value.grad.zero_() for value in step.model.parameters()] and None)
    batch = batch_of(tiny, step.gradient.preprocess, BATCH)
    step(batch[:2], batch[2], lambda model: seen.append(float(nn.utils.get_total_norm([model.embed.weight.grad]))))
    assert seen[0] > 0


def test_recording_waits_its_turn_with_smaller_pieces(tiny: Dataset) -> None:
    """Out of memory while it is recorded: it is recorded again, in halves."""
    step, eager = make_step(tiny), make_step(tiny)
    step.gradient.micro_batch = BATCH
    real = step.model.forward

    def scarce(images: Tensor) -> Tensor:
        if len(images) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(images)

    step.model.forward = scarce  # type: ignore[method-assign]
    batches = make_loader(tiny, "gpu_slice")
    step.capture(batches, Accelerator(CPU))
    assert step.gradient.micro_batch == 4
    train(step, batches)
    train(eager, batches)
    check_same_weights(step.model, eager.model)


def test_the_average_is_the_formula(tiny: Dataset) -> None:
    step = make_step(tiny, decay=0.5)
    weights = [next(step.model.parameters()).detach().clone()]
    batches = make_loader(tiny, "ram")
    current = loop.TrainingPass(0, len(batches), CPU)
    loop.train_epoch(
        step, batches, current, CPU, lambda timer: weights.append(next(step.model.parameters()).detach().clone())
    )
    expected = weights[0]
    for number, newest in enumerate(weights[1:], start=1):
        keep = min(0.5, number / (9 + number))
        expected = keep * expected + (1 - keep) * newest
    torch.testing.assert_close(next(step.evaluated.parameters()), expected)
    assert not torch.equal(weights[-1], expected)
    assert not any(value.requires_grad for value in step.evaluated.parameters())


def test_an_average_goes_on_where_it_was(tiny: Dataset) -> None:
    whole, parts = make_step(tiny, decay=0.9), make_step(tiny, decay=0.9)
    batches = make_loader(tiny, "ram")
    train(whole, batches, 2)
    train(parts, batches, 1)
    kept = copy.deepcopy((parts.model.state_dict(), parts.optimizer.state_dict(), parts.average.state_dict()))
    again = make_step(tiny, decay=0.9)
    again.model.load_state_dict(kept[0])
    again.optimizer.load_state_dict(kept[1])
    again.average.load_state_dict(kept[2])
    again.schedule.load_state_dict(parts.schedule.state_dict())
    loop.train_epoch(again, batches, loop.TrainingPass(1, 3, CPU), CPU)
    check_same_weights(again.evaluated, whole.evaluated, tolerance=0)


def test_what_is_compiled_within_an_epoch_is_no_time_of_it(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only moves where the test says: 10 s a step, and 1,000 s of compiling in the second."""
    now = 0.0
    step = make_step(tiny)

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Recompiling(Loader):
        def batches(self, number: int, start: int) -> Batches:
            for indices in self.sampler.batches(number, start):
                yield tiny.train.images[indices], tiny.train.labels[indices]

    def forward(*_: object) -> None:
        spend(5)  # two pieces a step
        if now == 20:
            spend(1000)
            step.gradient.compile_s += 1000

    monkeypatch.setattr("time.perf_counter", lambda: now)
    step.model.register_forward_hook(forward)
    loader = Recompiling(EpochSampler(23, BATCH, 3))
    current = loop.TrainingPass(0, len(loader), CPU)
    figures = loop.train_epoch(step, loader, current, CPU)
    assert (figures.compute_s, figures.seconds) == (30, 30)


# --- what is decided --------------------------------------------------------------------------------------------------


FAST = TrainerConfig("auto", "auto", Precision.auto, "auto", "auto")
PLAIN = TrainerConfig(None, False, Precision.fp32, False, False)


def never(size: int, precision: Precision) -> float:
    raise AssertionError("nothing depends on it")


def test_plain_measures_nothing_and_decides_nothing() -> None:
    assert decide(PLAIN, CPU, 500, 60_000, never) == StepConfig()


@pytest.mark.parametrize(("bf16", "precision"), [(0.95, Precision.fp32), (0.8, Precision.bf16)])
@pytest.mark.parametrize(("images", "compiled"), [(1_000_000, False), (10_000_000, True)])
def test_fast_is_what_pays(
    images: int, compiled: bool, bf16: float, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(size: int, precision: Precision) -> float:
        return {500: 0.99e-4, 250: 1e-4, 125: 2e-4}[size] * (bf16 if precision == Precision.bf16 else 1)

    trainer = decide(FAST, CPU, 500, images, seconds)
    assert trainer.micro_batch == 250  # among equals the smaller
    assert trainer.compile is compiled
    assert (trainer.precision, trainer.fused, trainer.cuda_graph) == (precision, True, False)
    assert set(trainer.reasons) == {field.name for field in fields(TrainerConfig)}
    assert (
        "trainer.micro_batch=250: microseconds an image by images at once: 125: 200, 250: 100, 500: 99"
        in trainer.lines()
    )
    assert StepConfig.recorded(trainer.record()) == trainer

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    there = decide(FAST, torch.device("cuda"), 500, images, seconds)
    assert (there.precision, there.fused, there.cuda_graph) == (Precision.bf16, True, True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert decide(FAST, torch.device("cuda"), 500, images, seconds).precision == Precision.fp32
    with pytest.raises(ConfigError, match=r"trainer\.precision=bf16: cuda has no bfloat16"):
        StepConfig(precision=Precision.bf16).check(torch.device("cuda"))
    by_hand = TrainerConfig(None, False, Precision.tf32, False, "auto")
    assert decide(by_hand, torch.device("cuda"), 500, images, never).cuda_graph is False
    with pytest.raises(ConfigError, match=r"trainer\.cuda_graph=true needs trainer\.fused=true"):
        decide(replace(by_hand, cuda_graph=True), torch.device("cuda"), 500, images, never)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cuda_graph": True, "fused": True}, r"trainer\.cuda_graph=true: needs a CUDA device, .* cpu; type "),
        ({"precision": Precision.tf32}, r"trainer\.precision=tf32: is CUDA's, .* type trainer\.precision=fp32 or "),
    ],
)
def test_what_the_device_has_not_is_refused_by_name(changed: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(TrainerConfig(**{**vars(PLAIN), **changed}), CPU, 500, 60_000, never)


def test_sizes_of_pieces_are_tried_until_they_are_slower_or_do_not_fit() -> None:
    def seconds(most: int) -> Callable[[int], float]:
        def taken(size: int) -> float:
            if size > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1.0 if size <= 1250 else 1.5

        return taken

    assert list(time_pieces(5000, seconds(10_000))) == [157, 313, 625, 1250, 2500]
    assert list(time_pieces(5000, seconds(700))) == [157, 313, 625]
    assert list(time_pieces(50, seconds(700))) == [50]
    with pytest.raises(torch.OutOfMemoryError):
        time_pieces(50, seconds(10))
    assert all(math.ceil(larger / 2) == smaller for smaller, larger in pairwise(time_pieces(5000, seconds(10_000))))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_that_is_kept_is_not_taken_anew() -> None:
    """A block above the 32 MiB from which glibc always asks the system, which counts the pages it hands out.

    In a process of its own: after an allocation that failed, as other tests want them, glibc serves a thread otherwise.
    """
    program = """if True:
        import resource, torch
        from vitmnist.memory import freed_memory_kept

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(4):
                torch.ones(2**24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        with freed_memory_kept():
            kept = min(faults() for _ in range(5))
        assert kept < faults() / 10, kept
    """
    subprocess.run([sys.executable, "-c", program], check=True)
