"""Each start of a run is a run of MLflow with all epochs."""

from pathlib import Path

import pytest

from tests.conftest import Printed, Train, result_of


@pytest.mark.slow
def test_each_start_is_a_run_of_mlflow_with_all_epochs(
    quick: list[str],
    train_here: Train,
    succeed: Printed,
    refuse: Printed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    described = ["name=base", "tags=[pets]", "notes='as usual'", "lr_scale={head*:0.5}", "log.per_class=true"]
    described.append("data.holdout=0.2")
    logger = f"logger=[{{name: mlflow, experiment: animals, uri: '{uri}'}}]"
    monkeypatch.chdir(tmp_path)
    options = [*quick, *described, logger, "log.every_steps=1", "log.images_every_epochs=5", "hydra.run.dir=run"]
    assert train_here(*options, "max_minutes=0").returncode == 75
    succeed("resume=run", "max_minutes=null")
    client = mlflow.MlflowClient(uri)
    (experiment,) = (found for found in client.search_experiments() if found.name == "animals")
    completed, stopped = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in (stopped, completed)] == ["KILLED", "FINISHED"]
    assert completed.info.run_name == "base"
    assert completed.data.tags.items() >= {"pets": "true", "mlflow.note.content": "as usual"}.items()
    assert completed.data.params["lr_scale"] == "{'head*': 0.5}"
    epochs = result_of(tmp_path / "run")["epochs"]
    for tag, values in (
        ("eval/acc", [epoch["eval_acc"] for epoch in epochs]),
        ("train_step/loss", [step["loss"] for epoch in epochs for step in epoch["steps"]]),
    ):
        history = client.get_metric_history(completed.info.run_id, tag)
        assert [(metric.step, metric.value) for metric in history] == [*enumerate(values, 1)]
    assert any(name.startswith("verbose_f1/") for name in completed.data.metrics)
    best = max(epoch["eval_acc"] for epoch in epochs)
    test = result_of(tmp_path / "run")["test"]["test_acc"]
    assert completed.data.metrics.items() >= {"train_result/best_acc": best, "train_result/test_acc": test}.items()
    images = [file.path for file in client.list_artifacts(completed.info.run_id, "images")]
    assert any("confusion_matrix" in path for path in images)
    (tmp_path / "mlflow.db").write_text("damaged")
    assert "mlflow: " in refuse(*options[:-1], "hydra.run.dir=other")
