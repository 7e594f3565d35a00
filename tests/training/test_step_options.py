"""What `trainer`, `ema_decay` and `experiment=speedrun` do: their rules, and their effect on a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn

from tests.conftest import Printed, Train, result_of, weights
from vitmnist.checkpoint.inference import load_inference_model
from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.errors import ConfigError, UnsupportedStepError
from vitmnist.models.base import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.runtime.signals import UNFINISHED
from vitmnist.training import setup, step_options
from vitmnist.training.step_options import StepConfig, resolve_step_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST = TrainerConfig("auto", "auto", Precision.auto, "auto", "auto")
PLAIN_TRAINER = TrainerConfig(None, False, Precision.fp32, False, False)


@pytest.mark.parametrize(
    ("device", "has_bf16", "ranks", "images", "expected"),
    [
        (CPU, False, 1, 399_999, StepConfig(500, False, Precision.fp32, True, False)),
        (CPU, True, 2, 400_000, StepConfig(500, True, Precision.bf16, True, False)),
        (CUDA, True, 1, 1, StepConfig(None, True, Precision.bf16, True, True)),
        (CUDA, False, 2, 1, StepConfig(None, True, Precision.fp32, True, False)),
    ],
)
def test_fast_follows_static_rules(
    device: torch.device,
    has_bf16: bool,
    ranks: int,
    images: int,
    expected: StepConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_options, "_has_bf16", lambda device: has_bf16)
    monkeypatch.setattr(step_options, "last_level_cache", lambda: 32 * 2**20)
    resolved = resolve_step_config(FAST, device, 500, images, ranks)
    assert replace(resolved, reasons={}) == expected
    assert resolved.reasons.keys() == vars(FAST).keys()
    assert StepConfig.from_dict(resolved.to_dict()) == resolved
    assert resolve_step_config(PLAIN_TRAINER, device, 500, images, ranks) == StepConfig()


def test_a_microbatch_fits_the_batch_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache, batch, expected in ((2**20, 500, 64), (2**10, 500, 1), (2**25, 100, 100), (None, 5000, 2048)):
        monkeypatch.setattr(step_options, "last_level_cache", lambda cache=cache: cache)
        assert resolve_step_config(FAST, CPU, batch, 1).micro_batch == expected


def test_batch_normalisation_in_microbatches_is_warned_of(
    quick: list[str], succeed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(options: CNNOptions, shape: tuple[int, int, int], classes: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(shape[0]), CNN(options, shape, classes))

    monkeypatch.setitem(MODELS._members, "cnn", (CNNOptions, build))
    warning = "trainer.micro_batch=4: the model has batch normalisation"
    assert warning in succeed(*quick, "model=cnn", "trainer.micro_batch=4")
    assert "batch normalisation" not in succeed(*quick, "model=cnn", "hydra.run.dir=whole")


@pytest.mark.parametrize(("device", "ranks", "fused"), [(CPU, 1, True), (CUDA, 2, True), (CUDA, 1, False)])
def test_a_graph_that_is_impossible_is_refused(
    device: torch.device, ranks: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_options, "_has_bf16", lambda device: True)
    message = r"trainer\.cuda_graph=true: needs a CUDA device, one process and a fused optimizer; type "
    with pytest.raises(ConfigError, match=message):
        resolve_step_config(replace(PLAIN_TRAINER, cuda_graph=True, fused=fused), device, 500, 1, ranks)


def test_all_that_is_fast_is_printed_and_recorded_and_learns_what_plain_learns(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    assert train_here(*quick, "hydra.run.dir=plain").returncode == 0
    ended = train_here(*quick, "trainer=fast", "trainer.precision=fp32", "hydra.run.dir=fast")
    assert ended.returncode == 0, ended.stderr
    plain, fast = (result_of(tmp_path / name) for name in ("plain", "fast"))
    reasons = fast["trainer"].pop("reasons")
    expected = {"micro_batch": 6, "compile": False, "precision": "fp32", "fused": True, "cuda_graph": False}
    assert fast["trainer"] == expected
    for key, value in (("micro_batch", "6"), ("compile", "false"), ("fused", "true")):
        assert f"trainer.{key}={value}: {reasons[key]}" in ended.stdout
    assert fast["summary"]["compile_s"] is None
    assert fast["config"]["trainer"]["micro_batch"] == "auto"  # as typed
    for ours, theirs in zip(fast["epochs"], plain["epochs"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_nothing_is_compiled_within_an_epoch(
    train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a loader that delivers floats, and a short last batch."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # recompilations are of the tracing
    ended = train_here(*quick, "trainer.compile=true", "data/loader=disk", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    result = result_of(tmp_path / "here")
    assert result["trainer"]["compile"] is True
    assert result["summary"]["compile_s"] > 0


def test_another_trainer_may_continue_a_run_and_then_keeps_its_options(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    """More epochs would let `compile=auto` decide otherwise, and round otherwise."""
    assert train_here(*quick, "max_minutes=0", "hydra.run.dir=here").returncode == UNFINISHED
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_options, "last_level_cache", lambda: 4 * step_options.CACHE_PER_IMAGE)
        assert train_here("resume=here", "trainer=fast").returncode == UNFINISHED
    resumed = train_here("resume=here", "max_minutes=null")
    assert resumed.returncode == 0, resumed.stderr
    assert result_of(tmp_path / "here")["trainer"]["micro_batch"] == 4
    checkpoint = torch.load(tmp_path / "here" / "checkpoints" / "last.pt", weights_only=True)
    assert all(group["fused"] for group in checkpoint["step"]["optimizer"]["param_groups"])


def test_a_capture_that_fails_is_an_error_only_if_asked_for_by_name(
    train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*parts: object) -> None:
        raise UnsupportedStepError("operation not permitted when stream is capturing")

    monkeypatch.setattr(setup, "capture_step", fail)
    for reasons in ({}, {"cuda_graph": "one launch per step"}):
        chosen = StepConfig(fused=True, cuda_graph=True, reasons=reasons)
        monkeypatch.setattr(setup, "resolve_step_config", lambda *parts, chosen=chosen: chosen)
        ended = train_here(*quick, f"hydra.run.dir=here{len(reasons)}")
        if not reasons:
            assert "error: trainer.cuda_graph=true: failed: operation not permitted" in ended.stderr
        else:
            assert ended.returncode == 0, ended.stderr
            assert "trainer.cuda_graph=false: failed: operation not permitted" in ended.stdout
            assert result_of(tmp_path / "here1")["trainer"]["cuda_graph"] is False


def test_the_ema_is_evaluated_and_saved(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    train_here(*quick, "data.holdout=5", "hydra.run.dir=plain")
    train_here(*quick, "data.holdout=5", "ema_decay=0.9", "hydra.run.dir=averaged")
    folders = [tmp_path / name for name in ("plain", "averaged")]
    plain, averaged = (torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["step"] for folder in folders)
    final = weights(folders[1])
    for name, value in final.items():
        assert torch.equal(averaged["model"][name], plain["model"][name])  # averaging does not change training
        assert torch.equal(value, averaged["ema"]["model"][name])
        assert not torch.equal(value, averaged["model"][name])
    last, best = (load_inference_model(folders[1], CPU, name).model.state_dict() for name in ("last", "best"))
    assert best.keys() == last.keys() == final.keys()
    assert all(torch.equal(value, final[name]) for name, value in last.items())
    losses = [result_of(folder)["epochs"][-1] for folder in folders]
    assert losses[0]["train_loss"] == losses[1]["train_loss"]
    assert losses[0]["eval_loss"] != losses[1]["eval_loss"]
