"""A run on the GPU never waits within an epoch, computes what the CPU computes, and resumes to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import PLAIN, Train, assert_same_weights, result_of
from tests.gpu import NEEDS_CUDA
from tests.training import test_step
from vitmnist import make_loader
from vitmnist.augment.preprocess import Preprocess
from vitmnist.config.schema import Precision
from vitmnist.data.datasets.base import Dataset
from vitmnist.optim.base import SCHEDULES
from vitmnist.runtime.signals import UNFINISHED
from vitmnist.runtime.timer import EpochTimer
from vitmnist.training.compilation import compile_step
from vitmnist.training.loop import EpochProgress, train_epoch
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepConfig

pytestmark = NEEDS_CUDA


def test_an_epoch_waits_for_the_gpu_only_at_its_borders(tiny: Dataset, cuda: torch.device) -> None:
    """torch raises at the first call that would make the host wait."""
    with make_loader("gpu_slice", tiny.train, batch_size=5, device=cuda, seed=3) as loader:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(cuda)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = SCHEDULES.build({"name": "constant"}, optimizer, 100)
        step = TrainStep(model, Preprocess(tiny.train).to(cuda), optimizer, schedule, batch_size=5)
        steps = 0

        def after_step(timer: EpochTimer) -> None:
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error" if steps < len(loader) else "default")

        try:
            train_epoch(step, loader, EpochProgress(0, loader.sampler, cuda), after_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_bf16_on_the_gpu_is_the_step_within_its_rounding(tiny: Dataset, cuda: torch.device) -> None:
    plain, rounded = (test_step.make_step(tiny, device=cuda, precision=one) for one in (Precision.fp32, Precision.bf16))
    with test_step.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        images, labels = next(loader.epoch(0))
        for step in (plain, rounded):
            step.forward_backward(images, labels, next(step.preprocess.keys(loader.sampler, 0)), len(labels))
    assert 0 < test_step.gradient_difference(rounded.model, plain.model) < 0.02


@pytest.mark.parametrize("optimizer", test_step.OPTIMIZERS_UNDER_TEST)
@pytest.mark.parametrize("name", ["gpu_slice", "prefetch", "disk"])
def test_a_compiled_step_on_the_gpu_learns_what_the_eager_step_learns(
    tiny: Dataset, cuda: torch.device, name: str, optimizer: str
) -> None:
    """Three epochs with a short last batch; `disk` delivers floats."""
    eager, compiled = (test_step.make_step(tiny, optimizer, decay=0.9, device=cuda) for _ in range(2))
    with test_step.make_loader(tiny, name, device=cuda) as loader:
        compile_step(compiled, loader, StepConfig(compile=True))
        expected, metrics = (test_step.train(step, loader) for step in (eager, compiled))
    assert [one["train_loss"] for one in metrics] == pytest.approx([one["train_loss"] for one in expected], rel=1e-3)
    test_step.check_same_weights(compiled.model, eager.model, tolerance=1e-3)
    test_step.check_same_weights(compiled.eval_model, eager.eval_model, tolerance=1e-3)


MODELS = {"cnn": ["model=cnn"], "vit of 197 tokens": ["model=vit", "model.patch_size=2"]}  # keys of several blocks


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # with kernels of attention of their own
@pytest.mark.parametrize("trainer", ["plain", "fast"])
def test_a_run_stopped_on_the_gpu_ends_as_if_it_had_not_been(
    trainer: str, precision: str, model: str, train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    """Stopped after two steps of an epoch, and resumed."""
    arguments = [argument for argument in quick if argument not in (PLAIN, "model=cnn")] + MODELS[model]
    arguments += [f"trainer={trainer}", f"trainer.precision={precision}", f"trainer.compile={trainer == 'fast'}"]
    arguments += ["device=cuda", "data/loader=gpu_slice", "data/augment=imagenet", "ema_decay=0.9"]
    arguments += ["schedule=one_cycle"]
    assert train_here(*arguments, "hydra.run.dir=whole").returncode == 0
    assert train_here(*arguments, "max_minutes=0", "hydra.run.dir=stopped").returncode == UNFINISHED
    resumed = train_here("resume=stopped", "max_minutes=null")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    result = result_of(tmp_path / "stopped")
    assert result["device"].startswith("cuda")
    assert result["trainer"]["compile"] is (trainer == "fast")
