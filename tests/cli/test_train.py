"""`train` leaves complete records. `name`, `tags` and `notes` describe a run, and `limit_batches` shortens one."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import CallHere, Printed, assert_same_weights, result_of
from tests.support.outputs import events
from vitmnist.cli.arguments import to_overrides


def test_a_run_leaves_its_records(succeed: Printed, quick: list[str], tmp_path: Path) -> None:
    printed = succeed(*quick, "data/loader=gpu_slice", "seed=5", "logger=tensorboard")
    (folder,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert f"tensorboard --logdir {folder.parent.relative_to(tmp_path)}\n" in printed
    result = result_of(folder)
    assert (result["status"], result["error"]) == ("completed", None)
    assert ("data/loader=gpu_slice" in result["overrides"], result["config"]["logger"]) == (True, ["tensorboard"])
    config = result["config"]
    assert (config["data"]["loader"]["name"], config["model"]["name"]) == ("gpu_slice", "cnn")
    assert (config["batch_size"], config["seed"], result["device"]) == (6, 5, "cpu")
    assert (result["dataset"]["train_size"], result["dataset"]["test_size"]) == (23, 7)
    assert len(set(result["dataset"]["sha256"].values())) == 4
    assert result["environment"]["torch"]
    assert [epoch["epoch"] for epoch in result["epochs"]] == [0, 1]
    for epoch in result["epochs"]:
        assert epoch["epoch_s"] == pytest.approx(epoch["train_s"] + epoch["eval_s"])
        assert 0 < epoch["data_wait_s"] + epoch["compute_s"] <= epoch["train_s"]
        assert epoch["images_per_s"] == pytest.approx(23 / epoch["train_s"])
        assert epoch["host_peak_mib"] > 50
        assert epoch["gpu_peak_mib"] is None
    assert (result["setup_s"] > 0, result["compile_s"]) == (True, None)
    assert yaml.safe_load((folder / ".hydra" / "config.yaml").read_text()) == result["config"]
    assert yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) == result["overrides"]
    assert re.match(r"\d\d:\d\d:\d\d  ", printed)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}  ", (folder / "vitmnist.log").read_text())


NOTES = "it's, ${well}"
DESCRIPTION = ("name=base line", "tags=[pets,a b]", *to_overrides({"notes": NOTES}))


def test_a_run_is_described_in_its_log_its_record_and_status_but_is_the_same_run(
    stateful: list[str], runs: Path, succeed: Printed, call_here: CallHere, tmp_path: Path
) -> None:
    printed = succeed(*stateful, *DESCRIPTION, "hydra.run.dir=runs/described")
    assert "name=base line\n" in printed
    assert "tags=['pets', 'a b']\n" in printed
    assert f"notes={NOTES}\n" in printed
    assert_same_weights(runs / "whole", tmp_path / "runs" / "described")
    config = result_of(tmp_path / "runs" / "described")["config"]
    assert [config.pop(key) for key in ("name", "tags", "notes")] == ["base line", ["pets", "a b"], NOTES]
    assert "runs/described: completed" in succeed("resume=runs/described", "name=other", "tags=[]", "notes=null")
    shown = call_here("status", "runs").stdout.splitlines()
    assert shown[0].split()[:4] == ["folder", "name", "tags", "state"]
    assert " base line  pets, a b  completed " in shown[1]
    assert "name" not in call_here("status", str(runs / "whole")).stdout
    (text,) = events(tmp_path / "runs" / "described").Tensors("config/text_summary")
    assert b"```yaml\nname: base line\ntags:\n" in text.tensor_proto.string_val[0]


def test_limited_batches_are_one_epoch_of_every_split(
    quick: list[str], succeed: Printed, call_here: CallHere, tmp_path: Path
) -> None:
    options = ("data.holdout=9", "limit_batches=1", "schedule=cosine", "schedule.warmup_epochs=1", "hydra.run.dir=run")
    printed = succeed(*quick, *options)
    assert "limit_batches=1\n" in printed
    assert "epoch 1/1 " in printed
    result = result_of(tmp_path / "run")
    assert [result["dataset"][f"{split}_size"] for split in ("train", "validation", "test")] == [6, 6, 6]
    assert (result["config"]["limit_batches"], len(result["epochs"]), result["stopped_early"]) == (1, 1, False)
    again = succeed("resume=run")
    assert again.startswith("run: completed")
    assert again.endswith("it was limited by limit_batches=1\n")
    whole = call_here("evaluate", "run", "--json")
    assert (json.loads(whole.stdout)["images"], whole.stderr) == (9, "")
