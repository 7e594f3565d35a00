"""Fine-tuning starts from other weights, can scale learning rates by parameter, and reads the file only once."""

import copy
import re
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.conftest import Printed, StartRanks, Train, assert_same_run, learned, weights
from vitmnist.checkpoint.storage import read_initial_weights
from vitmnist.errors import ConfigError, DataError
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.registry import Member, NoOptions
from vitmnist.training.fine_tuning import load_matching_weights, scale_learning_rates

STILL = "optimizer.lr=1e-30"
FROZEN = ("lr_scale={*:0.1,features.0.*:0}", "optimizer=adamw", "ema_decay=0.9", "trainer.clip_norm=1")


def make_cnn(width: int = 4, num_classes: int = 10) -> CNN:
    return CNN(CNNOptions(width), (1, 28, 28), num_classes)


@pytest.fixture
def pretrained(quick: list[str], tmp_path: Path, succeed: Printed) -> Path:
    """A run whose best weights differ from its final weights."""
    succeed(*quick, "data.holdout=5", "epochs=4", "optimizer.lr=0.05", "hydra.run.dir=pretrained")
    return tmp_path / "pretrained"


def test_a_run_starts_from_a_run_or_a_file_and_needs_neither_again(
    pretrained: Path, quick: list[str], tmp_path: Path, succeed: Printed, output_of: Printed
) -> None:
    best = torch.load(pretrained / "checkpoints" / "best.pt", weights_only=True)["step"]["model"]
    save_file(best, tmp_path / "best.safetensors")
    prefixed = {f"module._orig_mod.{key}": value for key, value in best.items()}
    torch.save({"epoch": 1, "state_dict": {}, "state_dict_ema": prefixed}, tmp_path / "of_timm.pth")
    wrapped = {f"backbone.{key}": value for key, value in best.items()}
    torch.save({"net": {"model_state_dict": wrapped}, "args": Namespace(lr=1)}, tmp_path / "model.pt")
    (pretrained / "checkpoints" / "last.pt").unlink()
    inits = {"pretrained": "", "best.safetensors": "", "of_timm.pth": "module. _orig_mod.", "model.pt": "backbone."}
    for name, (init, prefixes) in zip(("run", "other", "third", "fourth"), inits.items(), strict=True):
        output = succeed(*quick, STILL, f"init={init}", f"hydra.run.dir={name}")
        assert "started from 6 of 6 weights of init" in output
        assert re.findall(r"the prefix (\S+) is removed", output) == prefixes.split()
        assert all(torch.allclose(value, best[key]) for key, value in weights(tmp_path / name).items())
    assert_same_run(tmp_path / "run", tmp_path / "other")
    for content, message in (
        ([1], "holds no tensors by name, at the top or under step, ema, state_dict_ema, "),
        ([1], "net; list"),
        ({"state_dict": {"epoch": 1}}, "net; its keys are epoch"),
        ({"best": np.float64(1), "state_dict": best}, "its content is not only plain values and tensors; save the"),
    ):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(DataError) as refused:
            read_initial_weights(str(tmp_path / "other.pth"))
        assert message in str(refused.value)
    shutil.rmtree(pretrained)
    succeed("resume=run", "epochs=3")
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    for command in ("evaluate run", "predict run black.png", "export run --format torch"):
        output_of(*command.split())


def test_weights_that_differ_are_listed_unless_init_skip_names_them() -> None:
    model, state = make_cnn(), make_cnn(num_classes=3).state_dict() | {"extra": torch.ones(2)}
    del state["features.0.bias"]
    with pytest.raises(ConfigError) as refused:
        load_matching_weights(model, state, ["head.weight"])
    assert (
        "extra ([2] in init, missing in the model), features.0.bias (missing in init, [4] in the model), "
        "head.bias ([3] in init, [10] in the model); set"
    ) in str(refused.value)
    before = copy.deepcopy(model.state_dict())
    load_matching_weights(model, state, ["head.*", "extra", "features.0.bias"])
    after = model.state_dict()
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert same == {"head.weight", "head.bias", "features.0.bias"}
    assert torch.equal(after["features.3.weight"], state["features.3.weight"])
    of_lightning = {f"model.{key}": value for key, value in state.items()} | {"criterion.weight": torch.ones(3)}
    load_matching_weights(model, of_lightning, ["head.*", "extra", "features.0.bias", "criterion.*"])
    with pytest.raises(ConfigError, match=r"init_skip: 'hed\.\*' fits no weight; the model has features"):
        load_matching_weights(model, state, ["hed.*"])
    with pytest.raises(ConfigError, match=r"init_skip=\['\*'\]: leaves nothing of init"):
        load_matching_weights(model, {"other": torch.ones(2)}, ["*"])


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_learning_rates_are_scaled_and_groups_keep_their_options(name: str) -> None:
    def build(factors: dict[str, float]) -> tuple[nn.Module, dict[str, tuple[float, float]]]:
        model = make_cnn()
        optimizer = OPTIMIZERS.build({"name": name, "lr": 1.0, "weight_decay": 0.5}, model, True)
        assert scale_learning_rates(optimizer, model, factors) == []
        names = {parameter: key for key, parameter in model.named_parameters()}
        groups = [(group["lr"], group["weight_decay"], group["params"]) for group in optimizer.param_groups]
        return model, {names[parameter]: (lr, decay) for lr, decay, parameters in groups for parameter in parameters}

    _, plain = build({})
    assert {lr for lr, _ in plain.values()} == {1.0}
    model, scaled = build({"features.*": 0.1, "*.bias": 0.5, "features.0.*": 0.0})
    factors = {"features.3.weight": 0.1, "features.3.bias": 0.5, "head.weight": 1.0, "head.bias": 0.5}
    assert scaled == {key: (factor, plain[key][1]) for key, factor in factors.items()}
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"features.0.weight", "features.0.bias"}


def test_frozen_weights_stay_and_a_stopped_run_ends_as_an_uninterrupted_one(
    pretrained: Path, quick: list[str], tmp_path: Path, succeed: Printed, refuse: Printed, train_here: Train
) -> None:
    typed = [*quick, *FROZEN, "init=pretrained", "trainer.micro_batch=2", "data.holdout=5"]
    assert "(20,490 parameters, 20,330 trained)" in succeed(*typed, "hydra.run.dir=whole")
    assert train_here(*typed, "max_minutes=0", "hydra.run.dir=cut").returncode == 75
    shutil.move(pretrained, tmp_path / "gone")
    succeed("resume=cut", "max_minutes=null")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    reordered = "lr_scale={features.0.*:0,*:0.1}"  # Now `*` would match last, and freeze nothing.
    for resume in (["resume=cut"], [*typed, "hydra.run.dir=cut", "resume=auto"]):
        assert "'*': 0.1} (it was {'*'" in refuse(*resume, reordered, "init=pretrained", "epochs=3", "max_minutes=null")
    state = torch.load(tmp_path / "gone" / "checkpoints" / "best.pt", weights_only=True)["step"]["model"]
    for name, value in weights(tmp_path / "cut").items():
        assert torch.equal(value, state[name]) == name.startswith("features.0.")


def test_ranks_fine_tune_as_one_process_does(
    pretrained: Path, quick: list[str], tmp_path: Path, succeed: Printed, ranks: StartRanks
) -> None:
    typed = [*quick, *FROZEN, "init=pretrained"]
    succeed(*typed, "hydra.run.dir=alone")
    ranks(2, *typed, "hydra.run.dir=together").succeeded()
    alone, together = ([epoch["train_loss"] for epoch in learned(tmp_path / name)] for name in ("alone", "together"))
    assert together == pytest.approx(alone, rel=1e-4)
    first, others = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert all(torch.equal(first[name], others[name]) for name in first if name.startswith("features.0."))


class Tuned(nn.Module):
    """A timm network with a custom head."""

    def __init__(self, options: NoOptions, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        timm = pytest.importorskip("timm")
        self.backbone = timm.create_model("test_resnet", num_classes=0, in_chans=shape[0])
        self.head = nn.Linear(self.backbone.num_features, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


@torch._dynamo.config.patch(error_on_recompile=True)
@MODELS.temporarily(tuned=Member(NoOptions, Tuned))
@pytest.mark.parametrize("how", ["ema_decay=null", "ema_decay=0.5", "trainer.compile=true"])
def test_a_network_of_timm_starts_from_its_own_file_and_a_frozen_one_keeps_its_statistics(
    quick: list[str], tmp_path: Path, succeed: Printed, refuse: Printed, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    timm = pytest.importorskip("timm")
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "tuned.yaml").write_text("name: tuned\n")
    state = timm.create_model("test_resnet", in_chans=1).state_dict()
    state["bn1.running_mean"] += 1
    save_file(state, tmp_path / "resnet.safetensors")
    typed = [*quick, "--config-dir=own", "model=tuned", "init=resnet.safetensors"]
    assert "backbone.fc.bias ([1000] in init, missing in the model)" in refuse(*typed, "init_skip=[head.*]")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for factor in (0, 0.1) if how == "ema_decay=null" else (0,):
        scaled = f"lr_scale={{backbone.*:{factor}}}"
        succeed(*typed, how, "init_skip=[head.*,backbone.fc.*]", scaled, f"hydra.run.dir={factor}")
        after = weights(tmp_path / str(factor))
        changed = {
            key for key in after if not torch.equal(after[key], state.get(key.partition(".")[2], torch.empty(0)))
        }
        assert {"head.weight", "head.bias"} <= changed
        assert (changed == {"head.weight", "head.bias"}) == (factor == 0)
