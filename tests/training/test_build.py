"""A model with a wrong output is refused, its bugs are shown, and its operations must be deterministic."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import AddMembers, Printed, Train
from vitmnist.losses import LOSSES
from vitmnist.losses.cross_entropy import CrossEntropyOptions
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.registry import Member


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_model_has_an_output_for_each_class(
    outputs: int, quick: list[str], refuse: Printed, add_members: AddMembers
) -> None:
    """With more outputs, the model would train and predict classes that do not exist."""
    add_members(MODELS, cnn=Member(CNNOptions, lambda options, shape, num_classes: CNN(options, shape, outputs)))
    printed = refuse(*quick, "model=cnn")
    assert f"model=cnn: it returned [2, {outputs}] for 2 images of 10 classes; it must return logits [2, 10]" in printed


class Wrapped(nn.Module):
    """A model, and a function of its logits."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(self.model(images))


@pytest.mark.parametrize(
    ("build", "sweep"),
    [
        (lambda options, shape, num_classes: options.missing, ()),
        (lambda *args: Wrapped(CNN(*args), lambda logits: logits.missing), ()),
        (lambda options, shape, num_classes: options.missing, ("-m", "seed=1")),
    ],
    ids=["constructor", "forward", "sweep"],
)
def test_a_bug_in_a_model_is_shown_with_its_traceback(
    build: object, sweep: tuple[str, ...], quick: list[str], train_here: Train, add_members: AddMembers
) -> None:
    add_members(MODELS, cnn=Member(CNNOptions, build))
    ended = train_here(*sweep, *quick)
    assert ended.returncode == 1
    for part in ("Traceback", "test_build.py", "has no attribute 'missing'"):
        assert part in ended.stdout + ended.stderr


class Put(torch.autograd.Function):
    """The identity, with an operation in its backward pass that has no deterministic implementation."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.put(torch.tensor([0]), torch.ones(1))


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "data/loader=auto"])
def test_an_operation_without_a_deterministic_form_ends_the_run_with_the_key(
    where: str, quick: list[str], refuse: Printed, add_members: AddMembers
) -> None:
    def put(logits: Tensor, *targets: Tensor) -> Tensor:
        return logits.put(torch.tensor([0]), torch.ones(1))

    if where == "loss":
        add_members(LOSSES, cross_entropy=Member(CrossEntropyOptions, lambda *args: put))
    else:
        model = Member(CNNOptions, lambda *args: Wrapped(CNN(*args), put if where == "forward" else Put.apply))
        add_members(MODELS, cnn=model)
    typed = ["data/loader=auto", "data.loader.seconds=0.1"] if "auto" in where else []
    printed = refuse(*quick, *typed, "trainer.deterministic=true")
    torch.use_deterministic_algorithms(False)
    assert printed.count("put_ does not have a deterministic implementation, so a resumed run could differ") == 1
    assert printed.endswith("use another operation, or set trainer.deterministic=false\n")
