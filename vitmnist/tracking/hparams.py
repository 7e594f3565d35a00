"""What TensorBoard's HParams dashboard wants to know: the columns, and when a run began and how it ended.

torch's `add_hparams` makes a second run of each run, and columns of that run's keys alone. Here every run carries the
same columns: those of `KEYS`, and what was typed, which is the same for all jobs of a sweep. The seed and the round are
left out, since they are no choice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from vitmnist.config.labels import NOT_COMPARED, is_under, trainer_label
from vitmnist.tracking.result import Result

KEYS = (
    *("data/loader", "batch_size", "data/dataset", "data/augment", "data.shuffle", "data.drop_last", "model"),
    *("optimizer", "optimizer.lr", "schedule", "trainer", "epochs", "device"),
)
ALWAYS_SHOWN = ("data/loader", "batch_size", "model", "optimizer.lr")
METRICS = {
    "summary/eval_acc_last": "accuracy, %",
    "summary/eval_acc_best": "best accuracy, %",
    "summary/epoch_s_median": "epoch, s",
    "summary/data_wait_pct": "waiting for data, %",
    "summary/images_per_s": "images/s",
    "memory/host_mib": "host memory, MiB",
    "memory/gpu_mib": "GPU memory, MiB",
    "gpu/util_pct": "GPU busy, %",
}
TYPES = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING, float: api_pb2.DATA_TYPE_FLOAT64}

Value = bool | float | str


def columns(result: Result) -> dict[str, Value]:
    """The values of a run by their keys as one types them; numbers as floats."""
    return {key: _value(key, result) for key in (*KEYS, *_typed(result))}


def _typed(result: Result) -> list[str]:
    keys = [override.lstrip("+").partition("=")[0] for override in result.overrides]
    return [
        key for key in keys if not is_under(key, (*NOT_COMPARED, "seed", "profile", "hydra", "experiment", "hparams"))
    ]


def _value(key: str, result: Result) -> Value:
    choice = key.rpartition("@")[2].replace("/", ".").removeprefix("data.")
    if choice in result.choices:
        return f"auto: {result.choices[choice]}" if choice == "loader" and result.auto else result.choices[choice]
    if key == "trainer" and result.config:
        return trainer_label(result.config["trainer"])
    node: Any = result.config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, bool | str):
        return node
    return float(node) if isinstance(node, int | float) else "null" if node is None else str(node)


def begun(result: Result) -> Iterator[Summary]:
    """The columns, and a run that is running: a row of its own, since it names no group."""
    values = columns(result)
    # The dashboard shows five columns at first: those that are said to differ, then by name.
    differing = {*ALWAYS_SHOWN, *_typed(result)}
    infos = [
        api_pb2.HParamInfo(name=key, type=TYPES[type(value)], differs=key in differing) for key, value in values.items()
    ]
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title) for tag, title in METRICS.items()
    ]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=time.time())
    yield _summary(metadata.EXPERIMENT_TAG, experiment=experiment)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    yield _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def ended(status: int) -> Summary:
    """A run that has ended; `status` is one of `api_pb2.Status`."""
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=info)


def _summary(tag: str, **content: Any) -> Summary:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
