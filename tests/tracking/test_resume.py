"""A resumed run has its recorded values and what was typed, and refuses what may not change."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import Printed, Train, assert_same_run, result_of, write_mnist_like
from vitmnist.checkpoint import storage
from vitmnist.errors import ExitCode
from vitmnist.tracking.result import CONFIG_FILE
from vitmnist.tracking.resume import load_recorded_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume=cut", "batch_size=7"], "batch_size=7 (it was 6); only name, tags, notes, epochs, device, data.root"),
        (["resume=cut", "monitor=loss"], "monitor=loss (it was eval_acc)"),
        (["resume=cut", "model=vit"], "model.name=vit (it was cnn)"),
        (["resume=cut", "init=cut"], "init=cut (it was None)"),
        (["resume=cut", "init_skip=[head.*]"], "init_skip=['head.*'] (it was [])"),
        (["resume=cut", "lr_scale={features.*:0}"], "lr_scale={'features.*': 0.0} (it was {})"),
        (["resume=cut", "bach_size=7"], "bach_size: there is no such key; did you mean 'batch_size'?"),
        (["resume=cut", "-m"], "-m: resume=cut resumes a run, not a sweep; to resume a sweep"),
        (["resume=auto"], "resume=auto: needs a folder; set hydra.run.dir=FOLDER for a run, or hydra."),
        (["resume=~nobody-here"], "~nobody-here: holds no run"),
        (["resume=cut", "experiment=smoke"], "experiment=smoke: the run in cut began with no experiment"),
        (["resume=cut", "epochs=3,4"], "epochs=3,4: cannot be combined with resume="),
        (["resume=cut", "epochs=few"], "epochs=few: must be int"),
        (["resume=cut", "data/loader=rom"], "data/loader=rom: there is no such member; did you mean 'ram'?"),
        (["resume=cut", "--config-dir", "nowhere"], "--config-dir: nowhere: there is no such folder"),
    ],
)
def test_what_may_not_change_is_refused(runs: Path, refuse: Printed, arguments: list[str], message: str) -> None:
    def content() -> dict[Path, bytes | None]:
        files = (path for path in runs.rglob("*") if path.suffix != ".log")
        return {path: path.read_bytes() if path.is_file() else None for path in files}

    before = content()
    assert message in refuse(*arguments, folder=runs)
    assert content() == before


def test_a_checkpoint_of_another_version_is_refused_and_kept(runs: Path, refuse: Printed, tmp_path: Path) -> None:
    shutil.copytree(runs / "cut", tmp_path / "cut")
    kept = storage.read_newest_checkpoint(tmp_path / "cut")
    storage.write_checkpoint(tmp_path / "cut", {**kept, "format": 1})
    before = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    refused = refuse("resume=cut", "max_minutes=null")
    assert "last.pt: was written by another version of the program (checkpoint format 1; this" in refused
    assert "start a new run, or resume it with that version" in refused
    assert sorted((tmp_path / "cut" / "checkpoints").iterdir()) == before


def test_a_record_without_an_option_of_a_member_has_its_default_and_without_another_key_is_refused(
    runs: Path, refuse: Printed, succeed: Printed, output_of: Printed, tmp_path: Path
) -> None:
    """As one that was written before the option was added."""
    run = shutil.copytree(runs / "cut", tmp_path / "cut")
    state, record = storage.read_newest_checkpoint(run), run / CONFIG_FILE
    recorded = yaml.safe_load(record.read_text())
    for model in (state["config"]["model"], state["model_info"]["model"], recorded["model"]):
        del model["width"]
    storage.write_checkpoint(run, state)
    record.write_text(yaml.safe_dump(recorded, sort_keys=False))
    output_of("evaluate", "cut")
    succeed("resume=cut", "max_minutes=null")
    assert_same_run(runs / "whole", run)
    for config in (state["config"], recorded):
        del config["patience"]
    storage.write_checkpoint(run, state)
    record.write_text(yaml.safe_dump(recorded))
    assert "patience is missing" in refuse("resume=cut", "epochs=3")


def test_another_dataset_of_the_same_name_is_refused(runs: Path, refuse: Printed, tmp_path: Path) -> None:
    write_mnist_like(tmp_path / "KMNIST" / "raw", 299, 20)
    refused = refuse("resume=cut", f"data.root={tmp_path}", folder=runs)
    assert "the dataset has changed since the run began: train_images, train_labels" in refused


def test_a_change_on_resuming_is_kept(runs: Path, train_here: Train, succeed: Printed, tmp_path: Path) -> None:
    shutil.copytree(runs / "cut", tmp_path / "cut")
    changed = ["epochs=3", "data/loader=disk", "data.loader.num_workers=1"]
    log = tmp_path / "cut" / "vitmnist.log"
    begun = log.read_text()
    assert train_here("resume=cut", *changed).returncode == ExitCode.UNFINISHED
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}  ", log.read_text().removeprefix(begun))
    again = ["data.loader.num_workers=0", "max_minutes=null"]  # `ram`, the default, has no such key
    printed = succeed("resume=cut", *again)
    assert "epoch 3/3" in printed
    assert "disk loader" in printed
    result = result_of(tmp_path / "cut")
    assert result["overrides"][-2:] == again
    assert {"epochs=3", "data/loader=disk"} < {*result["overrides"]}
    assert result["config"]["data"]["loader"]["num_workers"] == 0


EXPERIMENT = """# @package _global_
data:
  dataset:
    test_size: {test_size}
"""


def test_a_run_keeps_what_its_yaml_said(quick: list[str], succeed: Printed, refuse: Printed, tmp_path: Path) -> None:
    """Also if the file has changed since, and in a folder of `--config-dir`."""
    file = tmp_path / "mine" / "experiment" / "small.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(EXPERIMENT.format(test_size=6))
    options = ["--config-dir", str(tmp_path / "mine"), "experiment=small"]
    succeed(*quick, *options, "epochs=1", "hydra.run.dir=own")
    recorded = load_recorded_config(tmp_path / "own", [])
    assert recorded.data.dataset["test_size"] == 6
    file.write_text(EXPERIMENT.format(test_size=4))
    assert load_recorded_config(tmp_path / "own", []) == recorded
    assert load_recorded_config(tmp_path / "own", ["data.dataset.test_size=5"]).data.dataset["test_size"] == 5
    file.unlink()
    resumed = succeed("resume=own", "epochs=2", "optimizer.lr=0.003", "data/loader=prefetch")
    assert "test split, 6 images" in resumed
    file.write_text(EXPERIMENT.format(test_size=6))
    again = [*quick, *options, "epochs=3", "resume=auto", "data/loader=prefetch", "hydra.run.dir=own"]
    assert "resume=auto: resuming own" in succeed(*again)
    refused = refuse(*quick, "experiment=article", "resume=auto", "hydra.run.dir=own")
    assert "error: experiment=article: the run in own began with experiment=small, and its values are kept" in refused
    file.write_text(EXPERIMENT.partition("\n")[2].format(test_size=6))
    assert "error: experiment/small.yaml: experiment: there is no such key" in refuse(*options)
    file.write_text("data: [\n")
    assert f'in "{file}", line 2' in refuse(*quick, *options)
