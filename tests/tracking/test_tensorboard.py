"""What TensorBoard shows of a run: one file, every step once, one row in HParams, pictures, the configuration."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from tests.conftest import Train, result_of
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.tracking.hparams import METRICS
from vitmnist.tracking.images import training_batch, worst_mistakes
from vitmnist.tracking.tensorboard import LAYOUT
from vitmnist.training.metrics import Predictions

CPU = torch.device("cpu")


@pytest.fixture
def quick(quick: list[str]) -> list[str]:
    """Overrides for a short run of four steps per epoch that draws its images once, at the end."""
    return [*quick, "tensorboard.images_every_epochs=5", "device=cpu"]


def events(folder: Path) -> EventAccumulator:
    (file,) = folder.glob("events.out.tfevents.*")
    return EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0}).Reload()


def parsed(folder: Path) -> tuple[api_pb2.Experiment, object, object]:
    contents = events(folder).PluginTagToContent(metadata.PLUGIN_NAME)
    return (
        metadata.parse_experiment_plugin_data(contents[metadata.EXPERIMENT_TAG]),
        metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG]),
        metadata.parse_session_end_info_plugin_data(contents[metadata.SESSION_END_INFO_TAG]),
    )


def test_a_run_is_one_row_of_hparams_with_all_that_was_chosen(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    ended = train_here(*quick, "data/loader=gpu_slice", "model.width=8", "seed=3", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    experiment, start, end = parsed(tmp_path / "here")
    columns = {info.name for info in experiment.hparam_infos}
    assert set(start.hparams) == columns
    assert {"data/loader", "batch_size", "model", "optimizer.lr", "schedule", "device", "model.width"} <= columns
    assert not {"seed", "data.root", "hydra.run.dir"} & columns
    assert start.hparams["data/loader"].string_value == "gpu_slice"
    assert start.hparams["batch_size"].number_value == 6
    assert start.hparams["data.drop_last"].bool_value is False
    assert start.group_name == ""  # TensorBoard then makes it a row of its own
    assert end.status == api_pb2.STATUS_SUCCESS
    written = set(events(tmp_path / "here").Tags()["scalars"])
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert metrics == set(METRICS)
    assert {tag for tag in metrics if "gpu" not in tag} <= written


def test_all_jobs_of_a_sweep_have_the_same_columns_and_tell_how_they_ended(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    train_here("-m", *quick, "data.holdout=null,5", "optimizer.lr=0.01,1e30,-1", "hydra.sweep.dir=here")
    rows = [parsed(folder) for folder in sorted((tmp_path / "here").glob("[0-9]*"))]
    columns = [[info.name for info in experiment.hparam_infos] for experiment, _, _ in rows]
    assert columns == [columns[0]] * 6
    assert "data.holdout" in columns[0]
    good, bad = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE
    assert [end.status for _, _, end in rows] == [good, bad, bad] * 2  # one failed, one was refused


def test_a_run_shows_its_configuration_its_steps_and_its_pictures(
    train_here: Train, quick: list[str], tmp_path: Path
) -> None:
    settings = ["tensorboard.every_steps=3", "tensorboard.images_every_epochs=2", "epochs=3", "schedule=one_cycle"]
    ended = train_here(*quick, *settings, "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    shown = events(tmp_path / "here")
    (text,) = shown.Tensors("config/text_summary")
    assert "name: kmnist" in text.tensor_proto.string_val[0].decode()
    records = [step for epoch in result_of(tmp_path / "here")["epochs"] for step in epoch["steps"]]
    assert [record["step"] for record in records] == [0, 3, 6, 9]
    for key in ("lr", "loss", "grad_norm"):
        assert [event.step for event in shown.Scalars(f"step/{key}")] == [0, 3, 6, 9]
        values = [event.value for event in shown.Scalars(f"step/{key}")]
        assert values == pytest.approx([record[key] for record in records])
    assert len({event.value for event in shown.Scalars("step/lr")}) > 1
    for tag in ("training_batch", "confusion_matrix", "worst_mistakes"):
        pictures = shown.Images(f"images/{tag}")
        assert [picture.step for picture in pictures] == [2, 3]  # epochs count from 1, as in the log
        assert Image.open(io.BytesIO(pictures[0].encoded_image_string)).width > 100
    layout = [tag for tag in shown.Tags()["tensors"] if "custom_scalars" in tag]
    assert layout
    charted = {tag for charts in LAYOUT.values() for _, tags in charts.values() for tag in tags}
    assert charted <= set(shown.Tags()["scalars"])


def test_what_is_not_wanted_is_not_written(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    off = ["tensorboard.every_steps=null", "tensorboard.images_every_epochs=null"]
    assert train_here(*quick, *off, "hydra.run.dir=here").returncode == 0
    tags = events(tmp_path / "here").Tags()
    assert tags["images"] == []
    assert not [tag for tag in tags["scalars"] if tag.startswith("step/")]


def test_after_a_resume_everything_stands_there_once(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    settings = [*quick, "tensorboard.every_steps=3", "tensorboard.images_every_epochs=1", "hydra.run.dir=here"]
    assert train_here(*settings).returncode == 0
    first = events(tmp_path / "here").Images("images/confusion_matrix")
    ended = train_here("resume=here", "epochs=4")
    assert ended.returncode == 0, ended.stderr
    shown = events(tmp_path / "here")
    for tag in shown.Tags()["scalars"]:
        steps = [event.step for event in shown.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
    assert [event.step for event in shown.Scalars("time/epoch_s")] == [1, 2, 3, 4]
    assert [event.step for event in shown.Scalars("step/loss")] == [0, 3, 6, 9, 12, 15]
    pictures = shown.Images("images/confusion_matrix")
    assert [picture.step for picture in pictures] == [1, 2, 3, 4]
    assert [picture.encoded_image_string for picture in pictures[:2]] == [
        picture.encoded_image_string for picture in first
    ]


def test_a_profile_is_a_trace_and_a_table(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here(*quick, "profile=true", "batch_size=2", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert "5 steps were profiled, and took longer for it; see here/profile" in ended.stdout
    trace = json.loads((tmp_path / "here" / "profile" / "trace.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")}
    assert len(steps) == 5
    table = (tmp_path / "here" / "profile" / "operations.txt").read_text()
    assert "Self CPU" in table
    assert "convolution_backward" in table


def test_a_profile_of_an_epoch_of_one_step_is_of_that_step(train_here: Train, quick: list[str], tmp_path: Path) -> None:
    ended = train_here(*quick, "profile=true", "batch_size=23", "hydra.run.dir=here")
    assert ended.returncode == 0, ended.stderr
    assert "1 steps were profiled" in ended.stdout


@pytest.mark.parametrize("shuffle", ["sample", "batch", "none"])
def test_the_training_batch_is_the_one_that_was_trained_on(tiny: Dataset, shuffle: str) -> None:
    sampler = EpochSampler(23, 6, 3, shuffle)
    preprocess = Preprocess(tiny.train)
    with LOADERS.build(LOADERS.complete({"name": "ram"}), tiny.train, sampler, CPU) as loader:
        grid = training_batch(tiny.train, loader, preprocess, 1)
        images, _ = next(iter(loader.epoch(1)))
    assert grid.shape == (3, 2 + 28 + 2, 2 + 6 * 30)
    for place, image in enumerate(images):
        shown = grid[0, 2:30, 2 + 30 * place : 30 + 30 * place]
        torch.testing.assert_close(shown, image[0] / 255, atol=1e-6, rtol=0)


def test_the_worst_mistakes_are_the_most_confident_ones(tiny: Dataset) -> None:
    right = tiny.test.labels
    confidence = torch.linspace(0.2, 0.8, len(right))
    assert worst_mistakes(tiny.test, Predictions(right, confidence)) is None
    wrong = right.clone()
    wrong[[1, 4]] = (right[[1, 4]] + 1) % 10
    classes = tiny.test.classes
    for files in (None, [f"b/{index}.png" for index in range(len(right))]):
        test = replace(tiny.test, files=files)
        titles = [axis.get_title() for axis in worst_mistakes(test, Predictions(wrong, confidence)).axes]
        assert titles[:2] == [
            f"{files[index] if files else index}\ntrue: {classes[right[index]]}\n"
            f"predicted: {classes[wrong[index]]}, {100 * confidence[index]:.1f}%"
            for index in (4, 1)
        ]
        assert not any(titles[2:])


def test_long_captions_lose_their_middle(tiny: Dataset) -> None:
    test = replace(tiny.test, files=["a" * 90 + f"/{index}.png" for index in range(len(tiny.test))])
    wrong = Predictions((tiny.test.labels + 1) % 10, torch.ones(len(tiny.test)))
    (name, _, _) = worst_mistakes(test, wrong).axes[0].get_title().split("\n")
    assert name == "a" * 14 + "…" + "a" * 8 + "/0.png"
