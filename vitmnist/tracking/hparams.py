"""Columns and rows of TensorBoard's HParams dashboard.

torch's `add_hparams` adds a second run for each run, with columns for that run's keys only. Here every run has the same
columns: `KEYS` and the overridden keys, which are the same for all jobs of a sweep. Seed and round are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from vitmnist.config.labels import trainer_label
from vitmnist.config.schema import NOT_COMPARED
from vitmnist.config.values import is_under
from vitmnist.tracking.metrics import SUMMARY
from vitmnist.tracking.result import Result

KEYS = (
    *("data/loader", "batch_size", "data/dataset", "data/augment", "data.shuffle", "data.drop_last", "model"),
    *("optimizer", "optimizer.lr", "schedule", "trainer", "epochs", "device"),
)
ALWAYS_SHOWN = ("data/loader", "batch_size", "model", "optimizer.lr")
METRICS = {f"summary/{key}": metric.column for key, metric in SUMMARY.items()}
TYPES = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING, float: api_pb2.DATA_TYPE_FLOAT64}
FIELDS = {bool: "bool_value", str: "string_value", float: "number_value"}

Value = bool | float | str


def session_start(result: Result) -> Iterator[Summary]:
    """The dashboard's columns, and the values of this run; it becomes a row of its own, since it names no group."""
    overridden = _overridden(result)
    values = {key: _value(key, result) for key in (*KEYS, *overridden)}
    # The dashboard shows five columns at first: those with `differs`, then by name.
    differs = {*ALWAYS_SHOWN, *overridden}
    now = time.time()
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=key, type=TYPES[type(value)], differs=key in differs)
            for key, value in values.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title) for tag, title in METRICS.items()
        ],
        time_created_secs=now,
    )
    yield _summary(metadata.EXPERIMENT_TAG, experiment=experiment)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=now)
    for key, value in values.items():
        setattr(start.hparams[key], FIELDS[type(value)], value)
    yield _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def session_end(status: int) -> Summary:
    """The end of a run; `status` is one of `api_pb2.Status`."""
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _overridden(result: Result) -> list[str]:
    keys = [override.lstrip("+").partition("=")[0] for override in result.overrides]
    skipped = (*NOT_COMPARED, "seed", "profile", "hydra", "experiment", "hparams_search")
    return [key for key in keys if not is_under(key, skipped)]


def _value(key: str, result: Result) -> Value:
    """The value of a key of the command line; numbers as floats, since one key needs one type in all runs."""
    group = key.rpartition("@")[2].replace("/", ".").removeprefix("data.")
    if group in result.choices:
        return f"auto: {result.choices[group]}" if group == "loader" and result.auto else result.choices[group]
    if key == "trainer" and result.config:
        return trainer_label(result.config["trainer"])
    node: Any = result.config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, bool | str):
        return node
    return float(node) if isinstance(node, int | float) else "null" if node is None else str(node)


def _summary(tag: str, **content: Any) -> Summary:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
