"""TensorBoard shows every epoch and step once, images, the configuration and the hyperparameters."""

import io
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from tests.conftest import Printed, Train, result_of
from tests.support.outputs import events
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.registry import NoOptions
from vitmnist.tracking.loggers.tensorboard import TensorBoard
from vitmnist.tracking.result import Result


@pytest.fixture
def images_at_end(quick: list[str]) -> list[str]:
    """Overrides for a short run of four steps per epoch that draws its images once, at the end."""
    return [*quick, "log.images_every_epochs=5", "device=cpu"]


def test_a_run_shows_quality_first_then_steps_times_images_config_and_hyperparameters(
    succeed: Printed, images_at_end: list[str], tmp_path: Path
) -> None:
    settings = ["log.every_steps=3", "log.images_every_epochs=2", "epochs=3", "schedule=one_cycle"]
    succeed(*images_at_end, *settings, "hydra.run.dir=here")
    assert [path.name for path in (tmp_path / "here").rglob("*tfevents*") if path.parent.name != "here"] == []
    shown, epochs = events(tmp_path / "here"), result_of(tmp_path / "here")["epochs"]
    for metric in build_epoch_table().values():
        values = [epoch[metric.name] for epoch in epochs]
        if None in values:
            assert metric.tag not in shown.Tags()["scalars"]
        else:
            assert [event.value for event in shown.Scalars(metric.tag)] == pytest.approx(values)
    steps = [step for epoch in epochs for step in epoch["steps"]]
    assert [step["step"] for step in steps] == [0, 3, 6, 9]
    for key in ("lr", "loss", "grad_norm"):
        assert [event.step for event in shown.Scalars(f"train_step/{key}")] == [1, 4, 7, 10], "counted from 1"
        values = [event.value for event in shown.Scalars(f"train_step/{key}")]
        assert values == pytest.approx([step[key] for step in steps])
    assert len({event.value for event in shown.Scalars("train_step/lr")}) > 1
    for tag in ("training_batch", "worst_mistakes"):
        images = shown.Images(f"visuals/{tag}")
        assert [image.step for image in images] == [2, 3]
        assert Image.open(io.BytesIO(images[0].encoded_image_string)).width > 100
    (text,) = shown.Tensors("config/text_summary")
    content = text.tensor_proto.string_val[0].decode()
    assert content.index("schedule=one_cycle") < content.index("name: kmnist")
    (keys,) = shown.PluginTagToContent("hparams").values()
    values = parse_session_start_info_plugin_data(keys).hparams
    assert (values["schedule"].string_value, values["epochs"].number_value) == ("one_cycle", 3)
    assert (values["seed"].string_value, values["model"].string_value) == ("42", "cnn")
    assert not {"data.holdout", "optimizer.lr", "logger"} & values.keys(), "not overridden"
    tags = sorted([*shown.Tags()["scalars"], *shown.Tags()["images"]])
    first = ["eval/acc", "eval/loss", "train/acc", "train/loss", "train_step/grad_norm"]
    assert tags[:5] == first, "open in TensorBoard"
    assert [*dict.fromkeys(tag.partition("/")[0] for tag in tags)][2:] == ["train_step", "usage", "verbose", "visuals"]


def test_a_job_shows_what_its_sweep_varies_and_the_value_in_the_report(tmp_path: Path) -> None:
    command = {"task": ["epochs=3", "optimizer.lr=0.1,0.2"]}
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": command}}))
    config = {"monitor": "eval_acc", "seed": 1, "epochs": 3, "optimizer": {"lr": 0.1}}
    job = tmp_path / "0-lr_0.1"
    job.mkdir()
    overrides = ["epochs=3", "optimizer.lr=0.1"]
    result = Result(folder=job, config=config, overrides=overrides, eval_split="validation")
    board = TensorBoard(NoOptions(), job, result)
    for epoch, accuracy in enumerate((70.0, 90.0, 80.0)):
        result.epochs.append({"epoch": epoch, "eval_acc": accuracy, "ended_at": 1e9, "steps": []})
        board.add_epoch(result.epochs[-1])
    shown = events(job)
    (keys,) = shown.PluginTagToContent("hparams").values()
    assert parse_session_start_info_plugin_data(keys).hparams.keys() == {"seed", "optimizer.lr"}
    assert [event.value for event in shown.Scalars("train_result/best_acc")] == [70.0, 90.0, 90.0]
    assert [event.value for event in shown.Scalars("eval/acc")] == [70.0, 90.0, 80.0]


def test_a_resumed_run_keeps_images_and_has_its_new_config_and_steps_and_images_can_be_off(
    succeed: Printed, images_at_end: list[str], tmp_path: Path
) -> None:
    succeed(*images_at_end, "log.images_every_epochs=1", "log.every_steps=null", "hydra.run.dir=here")
    succeed("resume=here", "epochs=3", "data/loader=disk", "data.loader.num_workers=0")
    succeed("resume=here", "epochs=4", "log.images_every_epochs=null")
    shown = events(tmp_path / "here")
    assert [event.step for event in shown.Scalars("eval/acc")] == [1, 2, 3, 4]
    assert [image.step for image in shown.Images("visuals/training_batch")] == [1, 2, 3]
    *_, text = shown.Tensors("config/text_summary")
    assert "epochs: 4" in text.tensor_proto.string_val[0].decode()
    assert not [tag for tag in shown.Tags()["scalars"] if tag.startswith("train_step/")]


@pytest.mark.parametrize("steps", [1, 3])
def test_epochs_and_steps_are_shown_once_if_resumed(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(epoch: int, attempt: int) -> EpochRecord:
        metrics = {metric.name: float(attempt) for metric in build_epoch_table().values()}
        numbers = range(epoch * steps, (epoch + 1) * steps)
        logged = [{"step": number, "loss": float(attempt), "lr": 0.1, "grad_norm": None} for number in numbers]
        return metrics | {"epoch": epoch, "ended_at": 1e9 + epoch, "steps": logged}

    epochs: list[EpochRecord] = []
    # The epochs of the checkpoint that each start resumes from, and the epochs that it trains.
    starts = [(0, 1), (0, 3), (2, 3), (1, 4), (5, 2)]
    for attempt, (done, trained) in enumerate(starts):
        monkeypatch.setattr("time.time", lambda now=1e9 + attempt: now)
        result = Result(folder=tmp_path, config={}, epochs=epochs[:done])
        board = TensorBoard(NoOptions(), tmp_path, result)
        for epoch in range(done, done + trained):
            result.epochs.append(record(epoch, attempt))
            board.add_steps(result.epochs[-1]["steps"])
            board.add_epoch(result.epochs[-1])
        epochs = result.epochs
    expected = [epoch["epoch_s"] for epoch in epochs]
    assert expected == [1, 3, 3, 3, 3, 4, 4]
    logged = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    shown = events(tmp_path)
    for tag in ("usage/epoch_s", "eval/acc"):
        assert [event.step for event in logged.Tensors(tag)] == [*range(1, 8)]
        assert [event.step for event in shown.Scalars(tag)] == [*range(1, 8)]
    assert [event.value for event in shown.Scalars("usage/epoch_s")] == expected
    assert [event.step for event in logged.Tensors("train_step/loss")] == [*range(1, 7 * steps + 1)]
    assert [(event.step, event.value) for event in shown.Scalars("train_step/loss")] == [
        (step["step"] + 1, step["loss"]) for epoch in epochs for step in epoch["steps"]
    ]


def test_steps_are_shown_with_a_checkpoint_within_their_epoch_and_once(
    train_here: Train, succeed: Printed, images_at_end: list[str], tmp_path: Path
) -> None:
    train_here(*images_at_end, "log.every_steps=1", "max_minutes=1e-9", "hydra.run.dir=here")
    shown = events(tmp_path / "here")
    assert [event.step for event in shown.Scalars("train_step/loss")] == [1]
    assert "eval/acc" not in shown.Tags()["scalars"]
    succeed("resume=here", "max_minutes=null")
    num_steps = sum(len(epoch["steps"]) for epoch in result_of(tmp_path / "here")["epochs"])
    shown_steps = [event.step for event in events(tmp_path / "here").Scalars("train_step/loss")]
    assert shown_steps == [*range(1, num_steps + 1)]
