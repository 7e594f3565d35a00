"""A graphed step equals the eager step, bit for bit.

The tests simulate what a graph does to its caller: a replay copies the arguments into the captured tensors, and
overwrites the outputs and gradients of the previous replay.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.support.steps import BATCH, CUTMIX, SHIFT, make_loader, make_step, train
from vitmnist.augment.preprocess import Compose
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError
from vitmnist.training.batch import Batch


def simulated_graph(
    module: nn.Module, sample_args: tuple[dict[str, Tensor]], allow_unused_input: bool
) -> Callable[..., Any]:
    """Simulates `torch.cuda.make_graphed_callables` without a GPU."""
    (samples,) = sample_args
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for _ in range(3):  # Torch warms up in the same way.
        module(samples)
    outputs, structure = tree_flatten(module(samples))
    gradients = [*map(torch.clone, parameters)]

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *arguments: Tensor) -> tuple[Tensor, ...]:
            for sample, argument in zip(samples.values(), arguments[: len(samples)], strict=True):
                sample.copy_(argument)
            with torch.enable_grad():
                context.computed = module(samples)
            for output, value in zip(outputs, tree_leaves(context.computed), strict=True):
                output.data.copy_(value.detach())
            return tuple(output.detach() for output in outputs)

        @staticmethod
        def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
            for gradient, value in zip(
                gradients, torch.autograd.grad(context.computed["loss"], parameters, upstream[0]), strict=True
            ):
                gradient.data.copy_(value)
            return (*[None] * len(samples), *(gradient.detach() for gradient in gradients))

    return lambda inputs: tree_unflatten(Replay.apply(*inputs.values(), *parameters), structure)


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", simulated_graph)


class NormedModel(nn.Sequential):
    """A model with batch normalisation, whose statistics warm-up and padding would change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("name", "augment"),
    [("disk", None), ("ram", SHIFT), ("disk", CUTMIX)],
    ids=["disk, plain", "ram, shift", "disk, cutmix"],
)
def test_a_graphed_step_equals_the_eager_step(name: str, augment: Compose | None, tiny: Dataset) -> None:
    """The epochs have a short last batch, clipped gradients and averaged weights; `disk` delivers float32."""
    parts: dict[str, Any] = {"augment": augment, "decay": 0.9, "clip_norm": 0.5, "micro_batch": None}
    metrics = []
    for graph in (False, True):
        step = make_step(tiny, "sgd", model=NormedModel(), graph=graph, **parts)
        loader = make_loader(tiny, name)
        torch.manual_seed(1)
        step.compile_or_capture(loader)
        assert (step.runner.compile_s > 0) == graph
        metrics.append((train(step, loader), step.state_dict(), torch.get_rng_state()))
    (ours, our_state, our_rng), (theirs, their_state, their_rng) = metrics
    assert torch.equal(our_rng, their_rng)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["train_loss"] == other["train_loss"]
        assert mine["train_acc"] == other["train_acc"]
    for part in ("model", "ema"):
        tensors = [*zip(our_state[part].values(), their_state[part].values(), strict=True)]
        assert all(torch.equal(mine, other) for mine, other in tensors if isinstance(mine, Tensor))


def test_arguments_of_another_shape_or_dtype_are_not_replayed(tiny: Dataset) -> None:
    eager, step = (make_step(tiny, augment=None, micro_batch=None, graph=graph) for graph in (False, True))
    step.compile_or_capture(make_loader(tiny, "ram"))
    images, labels = tiny.train.images[:BATCH], tiny.train.labels[:BATCH]
    for changed in (images[:1], images.float() / 255):
        batch = Batch(changed, labels[: len(changed)], BATCH)
        assert torch.equal(step.runner.compute_sums(batch)["loss"], eager.runner.compute_sums(batch)["loss"])


def test_a_step_that_cannot_be_captured_stays_eager_or_is_refused(
    tiny: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eager step on a GPU is slower in bf16 than in float32, so `precision=auto` changes too."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    reasons = {"graph": "the GPU does not wait for Python", "precision": "the GPU has compute capability 8.0 or higher"}
    step = make_step(tiny, micro_batch=None, graph=True, precision="bf16", reasons=reasons)
    loader, plain = make_loader(tiny, "ram"), make_step(tiny, micro_batch=None)
    step.compile_or_capture(loader)
    options = step.runner.options
    assert (options.graph, options.precision, step.runner.compile_s) == (False, "fp32", 0)
    assert options.reasons["graph"] == "failed: operation not permitted when stream is capturing"
    assert train(step, loader)[-1]["train_loss"] == train(plain, loader)[-1]["train_loss"]
    with pytest.raises(ConfigError, match=r"^trainer.graph=true: failed: .*; set trainer.graph=false$"):
        make_step(tiny, micro_batch=None, graph=True).compile_or_capture(make_loader(tiny, "ram"))


def test_an_error_in_the_model_is_not_reported_as_a_failed_capture(tiny: Dataset) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 10))
    step = make_step(tiny, model=model, micro_batch=None, graph=True, reasons={"graph": "why"})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step.compile_or_capture(make_loader(tiny, "ram"))
