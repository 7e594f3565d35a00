"""Loggers: chosen by a list, added as one file, and continued by a resumed run."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.conftest import Printed, Start, result_of
from vitmnist.tracking.loggers.wandb import Wandb, WandbOptions
from vitmnist.tracking.result import Result


def test_a_failing_logger_is_an_error(quick: list[str], refuse: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("vitmnist.tracking.loggers.tensorboard.TensorBoard.add_epoch", fail)
    assert "error: cannot write the records: no network" in refuse(*quick)


def test_an_epoch_that_a_killed_run_has_sent_to_wandb_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has five epochs of a run whose checkpoint has three."""
    wandb, run = MagicMock(), MagicMock(id="name", offline=False, resumed=True, summary={"epoch": 5})
    wandb.setup().settings.mode = "online"
    wandb.init.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb-id.txt").write_text("name")
    epochs = [{"epoch": epoch, "eval_acc": 90.0, "steps": [{"step": epoch, "loss": 0.5}]} for epoch in range(7)]
    logger = Wandb(WandbOptions(), tmp_path, Result(epochs=epochs[:3]))
    for record in epochs[3:]:
        logger.add_epoch(record)
    assert wandb.init.call_args.kwargs["id"] == "name"
    sent = [call.args[0] for call in run.log.call_args_list]
    assert [values.get("epoch", values.get("step/number")) for values in sent] == [6, 6, 7, 7]


@pytest.mark.slow
def test_wandb_gets_the_whole_run_offline_when_it_is_resumed(quick: list[str], start: Start, tmp_path: Path) -> None:
    """Read back from the files that `wandb sync` would send; each has an id of its own, and all epochs from the first.

    What wandb writes of a killed run is lost.
    """
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    options = ("log.every_steps=1", "log.images_every_epochs=1", "epochs=1", "hydra.run.dir=run")
    train = partial(start, environment={"WANDB_MODE": "offline"})
    code, output = train(*quick, *options, "logger=[{name: wandb, project: pets}]").ended()
    assert code == 0, output
    train("resume=run", "epochs=100000", "checkpoint.min_interval_s=null").until("epoch 3/100000").kill_group()
    code, output = train("resume=run", "epochs=3").ended()
    assert code == 0, output
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len({file.name for file in files}) == 3
    for file, last, drawn in ((files[0], 1, 1), (files[2], 3, 2)):
        epochs, steps, images = [], [], 0
        for record in map(Record.FromString, wandb_records(file)):
            if record.HasField("run"):
                assert file.name == f"run-{record.run.run_id}.wandb"
                assert record.run.project == "pets"
                assert {"batch_size", "optimizer"} <= {item.key for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                epochs += [int(row["epoch"]) for tag in row if tag == "eval/acc"]
                steps += [int(row["step/number"]) for tag in row if tag == "step/number"]
                images += "images/training_batch/width" in row
        assert (epochs, steps, images) == ([*range(1, last + 1)], [*range(1, 4 * last + 1)], drawn)
    assert len(result_of(tmp_path / "run")["epochs"]) == 3


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, in which a record may have several parts."""
    content, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
