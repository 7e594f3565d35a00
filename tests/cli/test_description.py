"""`name`, `tags` and `notes` describe a run without identifying it, and `limit_batches` shortens one."""

import json
from pathlib import Path

import pytest

from tests.conftest import CallHere, Printed, assert_same_weights, result_of
from tests.support.outputs import events
from vitmnist.cli.arguments import to_overrides
from vitmnist.cli.evaluate import main as evaluate
from vitmnist.cli.status import main as status

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
    shown = call_here(status, "runs").stdout.splitlines()
    assert shown[0].split()[:4] == ["folder", "name", "tags", "state"]
    assert " base line  pets, a b  completed " in shown[1]
    assert "name" not in call_here(status, str(runs / "whole")).stdout
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
    whole = call_here(evaluate, "run", "--json")
    assert (json.loads(whole.stdout)["images"], whole.stderr) == (9, "")


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("fast_dev_run=true", "limit_batches=10"),
        ("trainer.limit_val_batches=2", "limit_batches"),
        ("+debug=1", "limit_batches=10"),
        ("task_name=a", "name"),
    ],
)
def test_keys_of_other_trainers_lead_to_those_here(typed: str, key: str, refuse: Printed) -> None:
    name = typed.lstrip("+").partition("=")[0]
    assert refuse(typed) == f"error: {name}: there is no such key; set {key}\n"
