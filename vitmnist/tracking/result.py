"""Reads and writes the records of a run: `result.json`, `epochs.csv` and the configuration."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

import vitmnist
from vitmnist.metrics import MetricInfo, get_metric_infos
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.metrics.epoch_table import LOSS, EpochMetric, build_epoch_table
from vitmnist.runtime.files import (
    UnreadableError,
    display_path,
    encode_csv,
    read_json_or_yaml,
    write_atomic,
)

log = logging.getLogger(__name__)

FORMAT = 1
"""The version of the format of `result.json`. Increase it when the meaning of a key changes."""
FINAL_STATUSES = ("completed", "failed", "interrupted")
"""The possible values of `status` in `result.json`."""
CONFIG_FILE = Path(".hydra/config.yaml")
"""The file of the configuration in the folder of a run; Hydra uses the same name."""
OVERRIDES = Path(".hydra/overrides.yaml")
"""The file of the overrides in the folder of a run; Hydra uses the same name."""


@dataclass(kw_only=True, repr=False)
class Result:
    """The folder of a run, and the content of its `result.json`; docs/records.md describes each key.

    Until the run ends, `status` is failed; then it is one of `FINAL_STATUSES`. `pandas.DataFrame(result.epochs)` is a
    table with a row for each epoch.
    """

    folder: Path
    format: int = FORMAT
    status: str = "failed"
    error: str | None = None
    exit_code: int | None = None
    overrides: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    device: str | None = None
    distributed: dict[str, Any] | None = None
    eval_split: str | None = None
    resumed: bool = False
    stopped_early: bool = False
    test: dict[str, Any] | None = None
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    setup_s: float | None = None
    compile_s: float | None = None
    epochs: list[EpochRecord] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None

    def __repr__(self) -> str:
        epochs = f"{len(self.epochs)} epoch{'s' * (len(self.epochs) != 1)}"
        last = self.epochs[-1] if self.epochs else {}
        metrics = {"eval_acc": last.get("eval_acc"), "test_acc": (self.test or {}).get("test_acc")}
        accuracies = [f"{name} {value:.2f}" for name, value in metrics.items() if value is not None]
        return f"Result({', '.join([self.status, epochs, *accuracies, display_path(self.folder)])})"

    def load_model(self) -> Any:
        """Load the trained model as `vitmnist.load_model(result.folder)` does."""
        return vitmnist.load_model(self.folder)

    @classmethod
    def from_json(cls, path: Path) -> "Result":
        """Read a record. Missing keys get their defaults.

        Raises:
            FileNotFoundError: there is no such file.
            UnreadableError: the file cannot be read, is not a record, or has another format.
        """
        content = read_json_or_yaml(path)
        if not isinstance(content, dict) or content.get("status") not in FINAL_STATUSES:
            raise UnreadableError("does not contain the result of a run")
        if (version := content.get("format", FORMAT)) != FORMAT:
            raise UnreadableError(f"has format {version}, and this version of vitmnist reads format {FORMAT}")
        names = [option.name for option in fields(cls) if option.name in content and option.name != "folder"]
        return cls(folder=path.parent, **{name: content[name] for name in names})

    def write(self) -> None:
        """Write `result.json` atomically; raises `OSError`."""
        self.ended_at = time.time()
        record = asdict(self)
        del record["folder"]  # The folder can be moved.
        write_atomic(self.folder / "result.json", json.dumps(record, indent=2, allow_nan=False).encode())

    def write_epochs(self) -> None:
        """Write `epochs.csv`, a row for each epoch, for spreadsheets and pandas; raises `OSError`."""
        columns = "epoch", *build_epoch_table(), "first_of_start", "ended_at"
        write_atomic(self.folder / "epochs.csv", encode_csv(columns, self.epochs).encode())

    def write_config(self) -> None:
        """Write the overrides, and the configuration for `resume=`; raises `OSError`."""
        (self.folder / CONFIG_FILE).parent.mkdir(exist_ok=True)
        for name, record in ((CONFIG_FILE, self.config), (OVERRIDES, self.overrides)):
            write_atomic(self.folder / name, yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode())


@dataclass(frozen=True, kw_only=True)
class RunMetric(MetricInfo):
    """A value of a run that is recorded once, not in each epoch."""

    name: str  # The column in `report.csv`
    read: Callable[[Result], float | None]  # Returns the value; None if it was not measured.
    depends_on_weights: bool = False  # As the property of `EpochMetric`


def list_run_metrics() -> list[RunMetric]:
    """Return the values of a run that the report shows, and that loggers send at its end if they have a tag."""
    registered = {"loss": LOSS, **get_metric_infos()}
    setup = RunMetric(name="setup_s", unit="s", tag="", direction="min", column="set-up, s", read=attrgetter("setup_s"))
    return [*(_test_metric(f"test_{name}", metric) for name, metric in registered.items()), setup]


def _test_metric(name: str, metric: MetricInfo) -> RunMetric:
    """Return a registered metric, or the loss, as it is recorded for the test split at the end of a run."""
    shown = {"tag": f"train_result/test_{metric.tag}", "column": metric.column and f"test {metric.column}"}
    return RunMetric(
        **vars(metric) | shown, name=name, read=lambda result: (result.test or {}).get(name), depends_on_weights=True
    )


def list_main_test_metrics(monitored: EpochMetric) -> list[RunMetric]:
    """Return the metrics of the test split that are shown first: the headlines, and the monitored metric."""
    name = monitored.name.replace("eval_", "test_", 1)
    return [metric for metric in list_run_metrics() if metric.is_headline or metric.name == name]
