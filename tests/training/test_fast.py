"""What `trainer`, `ema_decay` and `experiment=speedrun` do to a run, seen from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file

from tests.conftest import PLAIN, Train, result_of
from vitmnist.checkpoint.inference import load_inference_model
from vitmnist.training import setup
from vitmnist.training.fast import StepConfig


def test_what_was_chosen_is_printed_and_recorded(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here(*quick, "trainer=fast", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    result = result_of(tmp_path / "here")
    chosen = dict(result["trainer"])
    reasons = chosen.pop("reasons")
    assert chosen.pop("precision") in ("fp32", "bf16")  # as this processor has it
    assert chosen == {"micro_batch": 6, "compile": False, "fused": True, "cuda_graph": False}
    for key, value in (("micro_batch", "6"), ("compile", "false"), ("fused", "true")):
        assert f"trainer.{key}={value}: {reasons[key]}" in ended.stdout
    assert result["summary"]["compile_s"] is None
    assert result["config"]["trainer"]["micro_batch"] == "auto"  # as it was typed


def test_plain_decides_nothing(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here(*quick, "hydra.run.dir=here")
    assert "trainer" not in ended.stdout
    assert result_of(tmp_path / "here")["trainer"] == StepConfig().record()


def test_all_that_is_fast_learns_what_plain_learns(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    train_here(*quick, "hydra.run.dir=plain")
    train_here(*quick, "trainer=fast", "trainer.micro_batch=4", "trainer.precision=fp32", "hydra.run.dir=fast")
    plain, fast = (result_of(tmp_path / name)["epochs"] for name in ("plain", "fast"))
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiling_is_told_apart(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    """Of a loader that delivers floats, and a short last batch: nothing is compiled within an epoch."""
    ended = train_here(*quick, "trainer.compile=true", "data/loader=disk", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    result = result_of(tmp_path / "here")
    assert result["trainer"]["compile"] is True
    assert result["summary"]["compile_s"] > 0


def test_an_automatic_loader_leaves_a_fresh_model(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    """The candidates are tried with the run's own model, which is then drawn back."""
    fast = ["trainer=fast", "trainer.micro_batch=4", "trainer.precision=fp32", "ema_decay=0.9", "schedule=one_cycle"]
    automatic = ["data/loader=auto", "data.loader.candidates.disk.num_workers=0"]
    for name, loader in (("by_hand", ["data/loader=ram"]), ("automatic", automatic)):
        assert train_here(*quick, *fast, *loader, f"hydra.run.dir={name}").returncode == 0
    losses = [
        [(epoch["train_loss"], epoch["eval_loss"]) for epoch in result_of(tmp_path / name)["epochs"]]
        for name in ("by_hand", "automatic")
    ]
    assert losses[0] == losses[1]


def test_a_resumed_run_keeps_what_was_decided(
    train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured once may come out otherwise the next time, and other sums would be rounded otherwise."""
    decide = setup.decide
    monkeypatch.setattr(setup, "decide", lambda *parts: replace(decide(*parts), micro_batch=4))
    stopped = train_here(*quick, "trainer=fast", "max_minutes=0", "hydra.run.dir=here")
    assert "go on with" in stopped.stdout, stopped.stderr
    monkeypatch.setattr(setup, "decide", lambda *parts: pytest.fail("it is decided"))
    resumed = train_here("resume=here", "max_minutes=null")
    assert resumed.returncode == 0, resumed.stderr
    assert result_of(tmp_path / "here")["trainer"]["micro_batch"] == 4
    assert result_of(tmp_path / "here")["status"] == "completed"


def test_another_trainer_may_take_over(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    stopped = train_here(*quick, "max_minutes=0", "hydra.run.dir=here")
    assert "go on with" in stopped.stdout, stopped.stderr
    resumed = train_here("resume=here", "max_minutes=null", "trainer=fast", "trainer.micro_batch=5")
    assert resumed.returncode == 0, resumed.stderr
    assert "trainer.fused=true" in resumed.stdout
    assert result_of(tmp_path / "here")["trainer"]["micro_batch"] == 5
    kept = torch.load(tmp_path / "here" / "checkpoints" / "last.pt", weights_only=True)
    assert all(group["fused"] for group in kept["optimizer"]["param_groups"])


def test_a_step_that_cannot_be_recorded_is_taken_plainly_or_refused(
    train_here: Train, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*parts: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nDetails.")

    decide = setup.decide
    monkeypatch.setattr("vitmnist.training.step.CapturedStep", fail)
    recorded = {"cuda_graph": True}
    monkeypatch.setattr(setup, "decide", lambda *parts: replace(decide(*parts), **recorded))
    refused = train_here(*quick, "trainer.fused=true")
    assert "error: trainer.cuda_graph=true: the step cannot be recorded: operation not permitted" in refused.stderr
    monkeypatch.setattr(setup, "decide", lambda *parts: decide(*parts).because("cuda_graph", True, "one launch"))
    ended = train_here(*quick, "trainer=fast", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert "trainer.cuda_graph=false: the step cannot be recorded: operation not permitted" in ended.stdout
    assert result_of(tmp_path / "here")["trainer"]["cuda_graph"] is False


def test_the_average_is_what_is_evaluated_and_kept(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    train_here(*quick, "data.holdout=5", "hydra.run.dir=plain")
    train_here(*quick, "data.holdout=5", "ema_decay=0.9", "hydra.run.dir=averaged")
    folders = [tmp_path / name / "checkpoints" for name in ("plain", "averaged")]
    newest, last = (torch.load(folder / "last.pt", weights_only=True) for folder in folders)
    final = load_file(folders[1] / "final.safetensors")
    for name, value in final.items():
        assert torch.equal(last["model"][name], newest["model"][name])  # averaging changes nothing of training
        assert torch.equal(value, last["average"]["model"][name])
        assert not torch.equal(value, last["model"][name])
    for weights in ("last", "best"):
        loaded = load_inference_model(tmp_path / "averaged", torch.device("cpu"), weights).model.state_dict()
        assert loaded.keys() == final.keys()
    assert all(
        torch.equal(value, final[name])
        for name, value in load_inference_model(tmp_path / "averaged", torch.device("cpu"), "last")
        .model.state_dict()
        .items()
    )
    losses = [result_of(tmp_path / name)["epochs"][-1] for name in ("plain", "averaged")]
    assert losses[0]["train_loss"] == losses[1]["train_loss"]
    assert losses[0]["eval_loss"] != losses[1]["eval_loss"]


def test_the_recipe_runs(train_here: Train, tmp_path: Path) -> None:
    small = ["data.dataset.train_size=300", "data.dataset.test_size=50", "epochs=2", "model.depth=1", PLAIN]
    ended = train_here("experiment=speedrun", *small, f"data.root={tmp_path}", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    result = result_of(tmp_path / "here")
    assert result["choices"] | {"optimizer": "adamw", "schedule": "one_cycle", "augment": "shift"} == result["choices"]
    assert result["trainer"]["fused"] is True
    assert result["config"]["label_smoothing"] > 0
    assert result["config"]["ema_decay"] > 0
