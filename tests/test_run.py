"""The hot path stays short, and reads like the loop that one would write by hand."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import pytest
import torch

from tests.conftest import PLAIN, REPOSITORY, Train
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


def test_the_training_loop_fits_on_a_screen() -> None:
    assert len(inspect.getsource(train_epoch).splitlines()) <= 50
