"""A run: its device, its memory, its loaders and tied weights."""

import shutil
import weakref
from pathlib import Path
from unittest.mock import ANY, Mock, call

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.conftest import AddMembers, Printed, Train, assert_same_run, result_of
from tests.support.fake_queue import simulate_gpus
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, ExitCode
from vitmnist.loaders.base import Loader
from vitmnist.loaders.decoded import RamLoader
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.registry import Member


def test_the_gpu_is_current_and_its_kernels_deterministic_before_the_model_is_built(
    refuse: Printed, quick: list[str], monkeypatch: pytest.MonkeyPatch, add_members: AddMembers
) -> None:
    """Graphs are captured on the current GPU; torch reads CUBLAS_WORKSPACE_CONFIG at the first matrix product."""
    simulate_gpus(monkeypatch, 2)
    calls = Mock()
    calls.build.side_effect = ConfigError("stopped here")
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr("vitmnist.trainer.use_deterministic_kernels", calls.use_deterministic_kernels)
    add_members(MODELS, cnn=Member(CNNOptions, calls.build))
    assert "stopped here" in refuse(*quick, "device=cuda:1")
    gpu = torch.device("cuda:1")
    before = [call.set_device(gpu), call.use_deterministic_kernels("auto", gpu)]
    assert calls.mock_calls == [*before, call.build(ANY, (1, 28, 28), 10)]


@pytest.mark.parametrize("name", ["ram", "prefetch"])
def test_training_and_validation_data_are_freed_before_the_test_split(
    name: str, succeed: Printed, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier: list[weakref.ref[Loader]] = []
    alive: list[int] = []
    init = Loader.__init__

    def counted(loader: Loader, sampler: EpochSampler) -> None:
        if sampler.size == 7:  # The test split has 7 images.
            alive.append(sum(ref() is not None for ref in earlier))
        else:
            earlier.append(weakref.ref(loader))
        init(loader, sampler)

    monkeypatch.setattr(Loader, "__init__", counted)
    succeed(*quick, f"data/loader={name}", "data.holdout=5")
    assert len(earlier) >= 2
    assert set(alive) == {0}


@pytest.mark.parametrize("stage", ["TrainStep.compile_or_capture", "Trainer.distribute", "CheckpointManager.restore"])
def test_an_error_in_the_set_up_closes_the_loaders(
    stage: str, runs: Path, refuse: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "cut", tmp_path / "cut")
    close = Mock()
    monkeypatch.setattr(RamLoader, "close", close)
    monkeypatch.setattr(f"vitmnist.trainer.{stage}", Mock(side_effect=ConfigError("stopped here")))
    assert "stopped here" in refuse("resume=cut", "max_minutes=null", "data/loader=ram")
    assert close.call_count == 2


def test_an_epoch_has_each_metric_of_the_table_and_no_other(runs: Path) -> None:
    for epoch in result_of(runs / "whole")["epochs"]:
        assert epoch.keys() - {"epoch", "first_of_start", "ended_at", "steps"} == build_epoch_table().keys()


def test_a_resumed_run_draws_the_random_numbers_of_a_whole_one(
    quick: list[str], train_here: Train, succeed: Printed, tmp_path: Path, add_members: AddMembers
) -> None:
    add_members(MODELS, cnn=Member(CNNOptions, lambda *arguments: nn.Sequential(CNN(*arguments), nn.Dropout(0.5))))
    succeed(*quick, "hydra.run.dir=whole")
    assert train_here(*quick, "max_minutes=0", "hydra.run.dir=cut").returncode == ExitCode.UNFINISHED
    succeed("resume=cut", "max_minutes=null")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_run_resumed_with_another_number_of_threads_warns(
    runs: Path, succeed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "cut", tmp_path / "cut")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert " threads and has 77 now" in succeed("resume=cut", "max_minutes=null")


class Tied(nn.Module):
    """A model with two names for one weight."""

    def __init__(self, options: CNNOptions, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(784, 784), nn.Linear(784, 784), nn.Linear(784, num_classes)
        self.decoder.weight = self.encoder.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(images.flatten(1))))


def test_tied_weights_are_trained_saved_and_evaluated(
    quick: list[str], succeed: Printed, tmp_path: Path, add_members: AddMembers
) -> None:
    add_members(MODELS, cnn=Member(CNNOptions, Tied))
    succeed(*quick, "hydra.run.dir=run")
    weights = load_file(tmp_path / "run" / "checkpoints" / "final.safetensors")
    assert torch.equal(weights["encoder.weight"], weights["decoder.weight"])
