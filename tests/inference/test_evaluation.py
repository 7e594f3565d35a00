"""`TrainedModel.evaluate`: the split of the training, or images of another dataset with the same classes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.conftest import Printed
from tests.support.pictures import write_pictures
from vitmnist.config.compose import compose
from vitmnist.config.schema import DataConfig
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError
from vitmnist.inference.trained_model import load_model
from vitmnist.tracking.result import CONFIG_FILE


def test_evaluation_uses_the_split_of_the_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = load_model(trained / "run").evaluate(overrides=["data.holdout=50"])
    assert "warning: the run divided its images differently" in capsys.readouterr().err
    assert (held_out.split_name, len(held_out.split)) == ("validation", 50)
    test = load_model(trained / "run").evaluate()
    assert (test.split_name, len(test.split), capsys.readouterr().err) == ("test", 300, "")
    assert len(load_model(trained / "run").evaluate("test", ["data.holdout=50"]).split) == 300
    train = load_model(trained / "run").evaluate("train")
    assert (train.split_name, len(train.split)) == ("train", 2000)
    with pytest.raises(ConfigError, match="split validation: the dataset has only train and test images"):
        load_model(trained / "run").evaluate("validation")


def test_a_mapped_split_can_be_larger_than_memory(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_mapped_images(dataset: Dataset, data: DataConfig) -> Dataset:
        return replace(dataset, test=replace(dataset.test, is_mapped=True))

    monkeypatch.setattr("vitmnist.inference.evaluation.hold_out_and_normalize", with_mapped_images)
    monkeypatch.setattr("vitmnist.runtime.memory.measure_free_memory", lambda device: 0)
    assert len(load_model(trained / "run").evaluate().split) == 300


def test_another_dataset_is_not_divided_as_that_of_the_run(trained: Path, tmp_path: Path) -> None:
    """It has nothing to hold out, because the run was not trained on it."""
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    recorded = yaml.safe_load((folder / CONFIG_FILE).read_text())
    pictures = compose(["data/dataset=image_folder", "data.dataset.path=digits"]).data.dataset
    recorded["data"] |= {"holdout": 50, "dataset": OmegaConf.to_container(pictures)}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(recorded))
    on_mnist = load_model(folder).evaluate(
        overrides=["data/dataset=mnist", "data.dataset.test_size=100", "data.holdout=null"]
    )
    assert (on_mnist.split_name, len(on_mnist.split)) == ("test", 100)


def test_classes_are_matched_by_name_and_sizes_must_fit(succeed: Printed, tmp_path: Path) -> None:
    folder, names = tmp_path / "pictures", ["cat", "dog", "eel"]
    for name in names:
        for path in write_pictures(folder / name, 6).glob("*/*"):
            path.rename(folder / name / path.name)
    root = f"data.root={tmp_path / 'root'}"
    data = ["data/dataset=image_folder", f"data.dataset.path={folder}", root, "model=cnn"]
    succeed(*data, "epochs=1", "hydra.run.dir=run")
    run, other = tmp_path / "run", tmp_path / "other"
    for name in names[1:]:  # without the first class, the others would be counted from 0
        shutil.copytree(folder / name, other / name)
    all_others = [f"data.dataset.path={other}", "data.dataset.test_share=0", root]
    evaluation = load_model(run).evaluate(overrides=all_others)
    assert set(evaluation.predictions.labels.tolist()) == {1, 2}
    with pytest.raises(ConfigError, match=r"the model takes images \[3, 28, 28\], the dataset has \[3, 9, 9\]"):
        load_model(run).evaluate(overrides=[*all_others, "data.dataset.size=9"])
    shutil.move(other / "eel", other / "zebra")
    with pytest.raises(ConfigError, match="classes that the model does not know: zebra; it knows cat, dog, eel"):
        load_model(run).evaluate(overrides=all_others)
