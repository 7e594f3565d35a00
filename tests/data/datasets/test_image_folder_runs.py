"""Training on a folder of pictures."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Train, result_of
from tests.data.datasets.test_image_folder import folder, load
from vitmnist.cli import evaluate

__all__ = ["folder"]  # a fixture


def evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `vitmnist evaluate` prints."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate", str(run)])
        evaluate.main()
    return capsys.readouterr()


def test_training_on_ones_own_pictures(
    folder: Path, train_here: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dog" / "3.png").write_bytes(b"")
    arguments = ("data/dataset=image_folder", f"data.dataset.path={folder}", f"data.root={tmp_path / 'root'}")
    ended = train_here(*arguments, "epochs=1", "data.dataset.skip_unreadable=true", "data.dataset.mode=rgb")
    assert ended.returncode == 0, ended.stderr
    assert "evaluated on the test split, 6 images" in ended.stdout
    run = next((tmp_path / "outputs" / "runs").glob("*/*"))
    result = result_of(run)
    pets = load(folder, mode="rgb", skip_unreadable=True)
    assert (run / "eval_files.txt").read_text().splitlines() == pets.test.files
    assert evaluated(run, capsys).err == ""
    for number in range(10):
        shutil.copy(folder / "dog" / "4.png", folder / "dog" / f"new-{number}.png")
    assert "warning: the images have changed since training: " in evaluated(run, capsys).err
    assert result["dataset"]["skipped"] == 1
    assert result["choices"]["dataset"] == "image_folder"
    refused = train_here(*arguments, "epochs=1")
    assert refused.returncode == 1
    assert "3.png" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_picture_that_goes_bad_under_a_run_fails_it_with_its_name(
    folder: Path, train_here: Train, tmp_path: Path
) -> None:
    """`disk` opens the files themselves; what the run has recorded stays."""
    arguments = (
        "data/dataset=image_folder",
        f"data.dataset.path={folder}",
        f"data.root={tmp_path / 'root'}",
        "epochs=1",
    )
    assert train_here(*arguments).returncode == 0
    changed = load(folder).train.reader.paths[0]
    times = changed.stat()
    changed.write_bytes(bytes(times.st_size))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # unseen where only the decoded pictures are read
    ended = train_here(*arguments, "data/loader=disk", "data.loader.num_workers=0", "hydra.run.dir=failed")
    assert ended.returncode == 1
    assert f"error: {changed}: cannot be read as a picture" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert result_of(tmp_path / "failed")["status"] == "failed"
    assert str(changed) in result_of(tmp_path / "failed")["error"]
