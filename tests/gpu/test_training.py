"""A run on the GPU never waits within an epoch, computes what the CPU computes, and resumes bit for bit."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import PLAIN, Train, assert_same_weights, result_of
from tests.gpu.conftest import NEEDS_CUDA
from tests.support import steps
from tests.support.operations import preset_of
from tests.support.processes import free_port
from vitmnist.augment.preprocess import Compose
from vitmnist.config.schema import Precision
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ExitCode
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.runtime.torch_world import TorchWorld
from vitmnist.runtime.world import World
from vitmnist.training.loop import train_epoch
from vitmnist.training.progress import EpochProgress

pytestmark = NEEDS_CUDA


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world of one rank, connected and wrapped by DDP like several ranks."""
    here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    world = TorchWorld()
    yield world
    world.disconnect()


def watched(batches: Iterable[object], number: int) -> Iterator[object]:
    """Yield the batches. From the second to the last batch, torch raises at any call that makes the host wait."""
    try:
        for index, batch in enumerate(batches, 1):
            torch.cuda.set_sync_debug_mode("error" if index < number else "default")
            yield batch
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "form",
    [{"micro_batch": 4}, {"micro_batch": None, "graph": True}, {"micro_batch": None, "precision": "fp16"}],
    ids=["wrapped by DDP", "graph", "fp16"],
)
@pytest.mark.parametrize("preset", ["affine", "cifar", "imagenet"])
@pytest.mark.parametrize("name", ["gpu_slice", "ram", "prefetch"])
def test_an_epoch_waits_for_the_gpu_only_at_its_borders(
    tiny: Dataset,
    cuda: torch.device,
    world: World,
    name: str,
    preset: str,
    form: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step uses all options. The first epoch is a warm-up."""
    graph = "graph" in form
    options = {"augment": preset_of(preset), "decay": 0.9, "smoothing": 0.1, **form}
    step = steps.make_step(tiny, device=cuda, steps=100, **options)
    batches, maxima = step.batches, []
    with steps.make_loader(tiny, name, device=cuda) as loader:
        step.compile_or_capture(loader)
        assert step.runner.options.graph == graph
        world.connect(cuda, 60)  # As in a run, NCCL starts its threads after the capture.
        if not graph:
            step.sum_gradients_over(world)
        for epoch in range(2):
            if epoch:
                monkeypatch.setattr(
                    step, "batches", lambda *parts, **more: watched(batches(*parts, **more), len(loader))
                )
            progress = EpochProgress(epoch, loader.sampler, cuda, log_every=1, world=world)
            train_epoch(step, loader, progress, lambda timer: maxima.append(world.max_over_ranks([0])))
    assert len(maxima) == 2 * len(loader)


@pytest.mark.parametrize("side", [28, 63], ids=["17 tokens", "82 tokens"])
def test_the_gpu_computes_the_transformer_of_the_cpu(side: int, cuda: torch.device) -> None:
    """Attention uses different kernels for few and for many tokens, on each device."""
    torch.manual_seed(0)
    model, images = ViT(ViTOptions(), (1, side, side), num_classes=10), torch.randn(3, 1, side, side)
    expected = model(images)
    torch.testing.assert_close(model.to(cuda)(images.to(cuda)).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_a_lower_precision_on_the_gpu_is_the_step_within_its_rounding(
    precision: str, graph: bool, tiny: Dataset, cuda: torch.device
) -> None:
    plain, rounded = (
        steps.make_step(tiny, device=cuda, precision=name, graph=graph, micro_batch=None)
        for name in (Precision.fp32.value, precision)
    )
    with steps.make_loader(tiny, "gpu_slice", device=cuda) as loader:
        for step in (plain, rounded):
            step.compile_or_capture(loader)
        batch = next(plain.batches(loader, 0))
        for step in (plain, rounded):
            step.forward_backward(batch)
    assert 0 < steps.gradient_difference(rounded.model, plain.model) < 0.02


@pytest.mark.parametrize("optimizer", steps.OPTIMIZERS_UNDER_TEST)
@pytest.mark.parametrize("name", ["gpu_slice", "prefetch", "disk"])
def test_a_compiled_step_on_the_gpu_learns_what_the_eager_step_learns(
    tiny: Dataset, cuda: torch.device, name: str, optimizer: str
) -> None:
    """The epochs have a short last batch; `disk` delivers float32."""
    eager, compiled = (
        steps.make_step(tiny, optimizer, decay=0.9, device=cuda, compile=value) for value in (False, True)
    )
    with steps.make_loader(tiny, name, device=cuda) as loader:
        compiled.compile_or_capture(loader)
        expected, metrics = (steps.train(step, loader) for step in (eager, compiled))
    losses, expected_losses = ([epoch["train_loss"] for epoch in epochs] for epochs in (metrics, expected))
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    steps.check_same_weights(compiled.model, eager.model, tolerance=1e-3)
    steps.check_same_weights(compiled.evaluated_model, eager.evaluated_model, tolerance=1e-3)


# With 197 tokens, the attention kernel processes the keys in several blocks.
MODELS = {"cnn": ["model=cnn"], "vit of 197 tokens": ["model=vit", "model.patch_size=2"]}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "trainer",
    [
        ["trainer=plain", "trainer.precision=fp32"],
        ["trainer=plain", "trainer.precision=bf16"],
        ["trainer=plain", "trainer.precision=fp16", "trainer.fused=true"],
        ["trainer=fast", "trainer.precision=tf32"],
        ["trainer=fast", "trainer.compile=true"],
        ["trainer=fast", "trainer.graph=true"],
    ],
    ids=str,
)
def test_a_run_stopped_on_the_gpu_ends_as_if_it_had_not_been(
    trainer: list[str], model: str, train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    """The run is stopped after two steps of an epoch, and resumed."""
    arguments = [argument for argument in quick if argument not in (PLAIN, "model=cnn")] + MODELS[model] + trainer
    arguments += ["device=cuda", "data/loader=gpu_slice", "data/augment=imagenet", "ema_decay=0.9"]
    arguments += ["schedule=one_cycle"]
    assert train_here(*arguments, "hydra.run.dir=whole").returncode == 0
    assert train_here(*arguments, "max_minutes=0", "hydra.run.dir=stopped").returncode == ExitCode.UNFINISHED
    assert train_here("resume=stopped", "max_minutes=null").returncode == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    result = result_of(tmp_path / "stopped")
    assert result["device"].startswith("cuda")
    assert result["trainer"]["compile"] is ("trainer.compile=true" in trainer)
    assert result["trainer"]["graph"] is (trainer[0] == "trainer=fast" and "trainer.compile=true" not in trainer)


@pytest.mark.parametrize("augment", [None, steps.SHIFT, steps.CUTMIX], ids=["plain", "shift", "cutmix"])
@pytest.mark.parametrize("name", ["gpu_slice", "ram", "prefetch", "disk"])
def test_a_graphed_step_on_the_gpu_is_the_eager_step_to_the_bit(
    tiny: Dataset, cuda: torch.device, name: str, augment: Compose | None
) -> None:
    """The epochs have a short last batch, batch normalisation and clipped gradients."""
    metrics = []
    for graph in (False, True):
        model = nn.Sequential(steps.make_vit(), nn.BatchNorm1d(10))
        parts = {"model": model, "augment": augment, "decay": 0.9, "clip_norm": 0.5, "micro_batch": None}
        step = steps.make_step(tiny, "sgd", device=cuda, graph=graph, **parts)
        with steps.make_loader(tiny, name, device=cuda) as loader:
            step.compile_or_capture(loader)
            assert step.runner.options.graph == graph
            metrics.append((steps.train(step, loader), step.model.state_dict()))
    (ours, our_weights), (theirs, their_weights) = metrics
    assert [epoch["train_loss"] for epoch in ours] == [epoch["train_loss"] for epoch in theirs]
    assert all(torch.equal(value, their_weights[name]) for name, value in our_weights.items())
