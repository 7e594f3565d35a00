"""The rules of `trainer=fast`, and the effect of `trainer` and `ema_decay` on a run."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401
from torch import Tensor, nn

from tests.conftest import AddMembers, Printed, Train, assert_same_run, result_of, weights
from vitmnist.config.schema import Precision, TrainerConfig
from vitmnist.errors import ConfigError
from vitmnist.inference.trained_model import load_model
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNNOptions
from vitmnist.registry import Member
from vitmnist.runtime.device import use_deterministic_kernels
from vitmnist.training import step_options
from vitmnist.training.step_options import StepOptions, resolve_step_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST = TrainerConfig("auto", "auto", Precision.auto, "auto", "auto")
ADVICE = "set trainer.precision=fp32 or auto"
FP16, TF32 = {"precision": Precision.fp16}, {"precision": Precision.tf32}
NO_GRAPH = "graph=true is not possible"
PLAIN_TRAINER = TrainerConfig(None, False, Precision.fp32, False, False)


@pytest.mark.parametrize(
    ("device", "has_bf16", "typed", "setting", "expected"),
    [
        (CPU, True, {}, {"num_images": 399_999}, StepOptions(2048, False, "bf16", True)),
        (CPU, True, {}, {"num_images": 400_000}, StepOptions(2048, True, "bf16", True)),
        (CPU, True, {}, {"batch_size": 500}, StepOptions(500, False, "bf16", True)),
        (CPU, False, {}, {"num_images": 4_000_000}, StepOptions(2048, True, "fp32", True)),
        (CUDA, False, {}, {"num_images": 4_000_000}, StepOptions(None, False, "fp32", True, True)),
        (CUDA, True, {}, {"num_images": 8_000_000}, StepOptions(None, False, "bf16", True, True)),
        (CUDA, True, {}, {"batch_size": 500, "ranks": 2}, StepOptions(None, False, "fp32", True)),
        (CUDA, True, {"graph": False}, {"batch_size": 500}, StepOptions(None, False, "fp32", True)),
        (CUDA, True, {"compile": True}, {"batch_size": 500}, StepOptions(None, True, "bf16", True)),
        (CUDA, True, {"micro_batch": 250}, {"batch_size": 500}, StepOptions(250, False, "fp32", True)),
        (CUDA, True, {"micro_batch": 500}, {"batch_size": 500}, StepOptions(500, False, "bf16", True, True)),
        (CUDA, True, {"graph": True, "precision": Precision.fp32}, {}, StepOptions(None, False, "fp32", True, True)),
        (CUDA, True, {**TF32, "fused": False}, {}, StepOptions(None, False, "tf32", False, True)),
        (CUDA, False, FP16, {}, StepOptions(None, False, "fp16", True, True)),
    ],
)
def test_fast_follows_static_rules(
    device: torch.device,
    has_bf16: bool,
    typed: dict,
    setting: dict[str, int],
    expected: StepOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA captures a graph if possible. On CUDA, bf16 pays only in a graph or in compiled code."""
    monkeypatch.setattr(step_options, "_has_bf16", lambda device: has_bf16)
    setting = {"batch_size": 5000, "num_images": 60_000, **setting}
    resolved = resolve_step_options(replace(FAST, **typed), device, **setting)
    assert replace(resolved, reasons={}) == expected
    assert resolved.reasons.keys() == {"micro_batch", "compile", "precision", "fused", "graph"} - typed.keys()
    assert resolve_step_options(PLAIN_TRAINER, device, **setting) == StepOptions()


@pytest.mark.parametrize(
    ("device", "typed", "ranks", "message"),
    [
        (CPU, {"graph": True}, 1, f"{NO_GRAPH}: only CUDA devices have graphs; set trainer.graph=false"),
        (CUDA, {"graph": True}, 2, f"{NO_GRAPH}: this run has 2 ranks, .*; set trainer.graph=false"),
        (CUDA, {"graph": True, "compile": True}, 1, f"{NO_GRAPH}: trainer.compile=true; set trainer.graph=false"),
        (CUDA, {"graph": True, "micro_batch": 250}, 1, f"{NO_GRAPH}: .*=250 takes a part .*; set trainer.graph=false"),
        (CPU, FP16, 1, f"precision=fp16: is for CUDA devices, not for cpu; {ADVICE}"),
        (CPU, TF32, 1, f"precision=tf32: is for CUDA devices, not for cpu; {ADVICE}"),
        (CUDA, TF32, 1, f"precision=tf32: needs compute capability 8.0, which cuda lacks; {ADVICE}"),
        (CUDA, {**FP16, "fused": False}, 1, "precision=fp16: needs a fused optimizer; set trainer.fused=true"),
    ],
)
def test_options_that_the_device_lacks_are_refused(
    device: torch.device, typed: dict, ranks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_options, "_has_bf16", lambda device: False)
    with pytest.raises(ConfigError, match=f"^trainer.{message}$"):
        resolve_step_options(replace(FAST, **typed), device, 500, 60_000, ranks)


def test_a_gpu_adds_up_in_one_order(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`trainer.deterministic=false` allows any kernel. With `warn_only`, torch's attention is not deterministic."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        use_deterministic_kernels("auto", CUDA)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with caplog.at_level("INFO"):
            use_deterministic_kernels(False, CUDA)
        assert not torch.are_deterministic_algorithms_enabled()
        assert "trainer.deterministic=false: if this run is resumed, it may differ by rounding" in caplog.text
        for value, is_on in (("auto", False), (True, True)):
            use_deterministic_kernels(value, CPU)
            assert torch.are_deterministic_algorithms_enabled() == is_on
    finally:
        torch.use_deterministic_algorithms(False)


def test_batch_normalisation_of_microbatches_is_noticed_and_of_one_image_refused(
    quick: list[str], train_here: Train, add_members: AddMembers
) -> None:
    def build(options: CNNOptions, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, num_classes))

    add_members(MODELS, cnn=Member(CNNOptions, build))
    # Microbatches of 4, 4, 4, 2 and of 4, 4, 1
    ended = train_here(*quick, "batch_size=14", "trainer.micro_batch=4")
    assert ended.stderr == (
        "error: batch normalisation cannot train on a batch or microbatch of one image; set data.drop_last=true if it "
        "is the last one, else trainer.micro_batch=null or a larger batch_size\n"
    )
    assert "trainer.micro_batch=4: the model has batch normalisation" in ended.stdout
    assert "dataset" not in ended.stdout, "the run is refused before its set-up is logged"


def test_the_choices_of_fast_are_printed_and_recorded(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    printed = succeed(*quick, "trainer=fast", "trainer.precision=fp32", "hydra.run.dir=fast")
    fast = result_of(tmp_path / "fast")
    reasons = fast["trainer"].pop("reasons")
    assert fast["trainer"] == {"micro_batch": 6, "compile": False, "precision": "fp32", "fused": True, "graph": False}
    for key, value in (("micro_batch", "6"), ("compile", "false"), ("fused", "true")):
        assert f"trainer.{key}={value}: {reasons[key]}" in printed
    assert fast["compile_s"] is None
    assert fast["config"]["trainer"]["micro_batch"] == "auto"


class Branching(nn.Linear):
    """A model whose forward pass reads a value from the device, which cannot be compiled."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


@MODELS.temporarily(cnn=Member(CNNOptions, lambda options, shape, num_classes: Branching(784, num_classes)))
def test_a_model_that_cannot_be_compiled_is_refused_only_if_compiling_was_asked_for_by_name(
    succeed: Printed, refuse: Printed, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `trainer.compile=auto`, the run is the same as without compiling."""
    monkeypatch.setattr(step_options, "COMPILE_FROM_IMAGES", dict.fromkeys(Precision, 0))
    printed = refuse(*quick, "trainer.compile=true")
    assert re.search(r"(?i)error: trainer.compile=true: failed: .*branch.*; set trainer.compile=false", printed)
    succeed(*quick, "hydra.run.dir=plain")
    assert "trainer.compile=false: failed: " in succeed(*quick, "trainer.compile=auto", "hydra.run.dir=here")
    assert_same_run(tmp_path / "here", tmp_path / "plain")
    trainer = result_of(tmp_path / "here")["trainer"]
    assert trainer["compile"] is False
    assert trainer["reasons"]["compile"].startswith("failed: ")


def test_the_ema_is_evaluated_and_saved(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    succeed(*quick, "data.holdout=5", "hydra.run.dir=plain")
    succeed(*quick, "data.holdout=5", "ema_decay=0.9", "hydra.run.dir=averaged")
    folders = [tmp_path / name for name in ("plain", "averaged")]
    plain, averaged = (torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["step"] for folder in folders)
    final = weights(folders[1])
    for name, value in final.items():
        assert torch.equal(averaged["model"][name], plain["model"][name])  # Averaging does not change training.
        assert torch.equal(value, averaged["ema"]["model"][name])
        assert not torch.equal(value, averaged["model"][name])
    last, best = (load_model(folders[1], name, "cpu").module.state_dict() for name in ("last", "best"))
    assert best.keys() == last.keys() == final.keys()
    assert all(torch.equal(value, final[name]) for name, value in last.items())
    losses = [result_of(folder)["epochs"][-1] for folder in folders]
    assert losses[0]["train_loss"] == losses[1]["train_loss"]
    assert losses[0]["eval_loss"] != losses[1]["eval_loss"]
