"""The hot path stays short, and reads like the loop that one would write by hand."""

from __future__ import annotations

import inspect
import traceback
import weakref
from pathlib import Path

import pytest
import torch

from tests.conftest import PLAIN, REPOSITORY, Printed, Train
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import Loader
from vitmnist.models.cnn import CNN
from vitmnist.training.loop import train_epoch


def test_backward_is_seven_frames_away(train_here: Train, tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seventh is train.py, which the test takes the place of."""
    stacks: list[list[str]] = []
    backward = torch.Tensor.backward

    def recorded(tensor: torch.Tensor) -> None:
        frames = traceback.extract_stack()[:-1]
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(REPOSITORY / "vitmnist")]
        stacks.append([frame.name for frame in ours])
        backward(tensor)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    arguments = ["data/dataset=kmnist", f"data.root={tiny_root}", "batch_size=10", "epochs=1", "model=cnn", PLAIN]
    for more in ([], ["trainer=fast"], ["-m", "seed=1"]):
        stacks.clear()
        assert train_here(*more, *arguments).returncode == 0
        assert stacks[0][-4:] == ["fit", "train_epoch", "__call__", "forward_backward"]
        assert len(stacks[0]) <= 6, stacks[0]


def test_kernels_are_deterministic_before_a_model_runs(refuse: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product on a GPU, and never again."""
    calls: list[str] = []
    forward = CNN.forward
    monkeypatch.setattr(CNN, "forward", lambda *args: calls.append("forward") or forward(*args))
    monkeypatch.setattr("vitmnist.trainer.use_deterministic_kernels", lambda *args: calls.append("deterministic"))
    assert "cifar-10" in refuse("data/dataset=cifar10", "data.root=nowhere", "model=cnn")
    assert calls == ["deterministic", "forward"]  # the model is tried before data are read


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "cache", "prefetch"])
def test_the_first_two_sets_are_freed_before_that_of_the_test_split(
    name: str, succeed: Printed, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier: list[weakref.ref[Loader]] = []
    alive: list[int] = []
    init = Loader.__init__

    def counted(loader: Loader, sampler: EpochSampler) -> None:
        if sampler.size == 7:  # of the test split
            alive.append(sum(ref() is not None for ref in earlier))
        else:
            earlier.append(weakref.ref(loader))
        init(loader, sampler)

    monkeypatch.setattr(Loader, "__init__", counted)
    succeed(*quick, f"data/loader={name}", "data.holdout=5")
    assert len(earlier) >= 2
    assert set(alive) == {0}


def test_the_training_loop_fits_on_a_screen() -> None:
    assert len(inspect.getsource(train_epoch).splitlines()) <= 50
