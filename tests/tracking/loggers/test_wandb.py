"""Each start of a run is a run of Weights & Biases with all epochs."""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.conftest import Start, result_of
from vitmnist.tracking.loggers.wandb import Wandb, WandbOptions
from vitmnist.tracking.result import Result


def test_each_start_is_a_run_of_wandb_with_all_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock(Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    epochs = [{"epoch": epoch, "eval_acc": 90.0, "steps": [{"step": epoch, "loss": 0.5}]} for epoch in range(4)]
    config = {"name": "base", "tags": ["pets"], "notes": "as usual"}
    result = Result(folder=tmp_path, epochs=epochs[:3], config=config)
    logger = Wandb(WandbOptions(), tmp_path, result)
    assert wandb.init.call_args.kwargs.items() >= config.items()
    logger.add_steps(epochs[3]["steps"])
    logger.add_epoch(epochs[3])
    logger.add_images({"worst_mistakes": MagicMock()}, 3)
    log = wandb.init.return_value.log
    sent = [call.args[0] for call in log.call_args_list]
    for metric, axis in (("eval/acc", "epoch"), ("train_step/loss", "train_step/number")):
        assert [values[axis] for values in sent if metric in values] == [1, 2, 3, 4]
    assert [values["epoch"] for values in sent if "visuals/worst_mistakes" in values] == [4]
    result.test = {"test_acc": 80.0}
    logger.__exit__(None)
    assert log.call_args.args == ({"epoch": 3, "train_result/test_acc": 80.0},)
    log.side_effect = wandb.Error("no network")
    with pytest.raises(OSError, match="wandb: no network"):  # A run that ends with an OSError is saved.
        logger.add_epoch(epochs[3])


@pytest.mark.slow
def test_each_start_is_a_run_of_wandb_in_the_folder_of_the_run(quick: list[str], start: Start, tmp_path: Path) -> None:
    """This holds offline, and after SIGKILL."""
    pytest.importorskip("wandb")
    options = ("log.images_every_epochs=1", "epochs=1", "hydra.run.dir=run")
    train = partial(start, environment={"WANDB_MODE": "offline"})
    code, output = train(*quick, *options, "logger=[{name: wandb, project: pets}]").ended()
    assert code == 0, output
    train("resume=run", "epochs=100000", "checkpoint.min_interval_s=null").until("epoch 3/100000").kill_group()
    code, output = train("resume=run", "epochs=3").ended()
    assert code == 0, output
    files = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert len({file.name for file in files}) == 3
    assert len(result_of(tmp_path / "run")["epochs"]) == 3
