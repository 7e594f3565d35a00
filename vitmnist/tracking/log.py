"""Writes the log lines of a run."""

import logging
from collections.abc import Mapping
from typing import Any

from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import Dataset
from vitmnist.loaders.base import Loader
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import EpochMetric, build_epoch_table
from vitmnist.runtime.world import World
from vitmnist.timing.table import Bottleneck, format_bottleneck
from vitmnist.tracking.bottleneck import advise_on_launches, find_bottleneck
from vitmnist.tracking.result import Result, list_main_test_metrics
from vitmnist.training.step import TrainStep

log = logging.getLogger(__name__)

EPOCH_TIMES = "{epoch_s:.2f} s, {data_wait_pct:.1f}% of training waiting for data, {images_per_s:,.0f} images/s"
"""The end of the log line of an epoch, which begins with the headlines."""


def log_setup(config: Config, result: Result, dataset: Dataset, step: TrainStep, loader: Loader, world: World) -> None:
    """Log model, dataset, loader and device."""
    for key in ("name", "tags", "notes", "limit_batches"):
        if value := getattr(config, key):
            log.info("%s=%s", key, value)
    sizes = {parameter: parameter.numel() for parameter in step.model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    total = sum(sizes.values())
    frozen_note = "" if trained == total else f", {trained:,} trained"
    loader_name = (result.auto or config.data.loader)["name"]
    options = "".join(f" with {key}={value}" for key, value in loader.resolved_options.items())
    ranks = f", divided among {world.size} processes" if world.size > 1 else ""
    log.info("%s (%s parameters%s) on %s", config.model["name"], f"{total:,}", frozen_note, dataset.name)
    log.info("%s loader%s, %s batches of %d%s", loader_name, options, f"{len(loader):,}", config.batch_size, ranks)
    log.info("device=%s is %s", config.device, step.device)
    log.info(
        "each epoch is evaluated on the %s split, %s images", dataset.eval_split_name, f"{len(dataset.eval_split):,}"
    )
    if compile_s := step.runner.compile_s:
        action = "compilation" if step.runner.options.compile else "capturing the graph"
        log.info("%s took %.1f s, which are not part of an epoch", action, compile_s)


def log_epoch(result: Result, epochs: int, monitored: EpochMetric) -> None:
    """Log one line for the last epoch, with the monitored metric; the log counts epochs from 1, the records from 0."""
    record, splits = result.epochs[-1], {"train": "train", "eval": result.eval_split}
    for name, metric in build_epoch_table().items():
        if metric.is_headline and record.get(name) is not None:
            split, _, label = name.partition("_")
            splits[split] = f"{splits[split]} {label} {metric.format(record[name])}"
    parts = [f"epoch {record['epoch'] + 1}/{epochs}", *splits.values(), EPOCH_TIMES.format_map(record)]
    if not monitored.is_headline:
        parts.append(f"{monitored.name} {monitored.format(record[monitored.name])}")
    log.info("%s", "  ".join(map(str, parts)))


def log_early_stop(result: Result, monitor: Monitor) -> None:
    """Log that training stopped before its last epoch, and why."""
    best = monitor.best_epoch(result.epochs)
    if result.stopped_early and best is not None:
        message = "stopped early: no epoch was better than epoch %d (%s %.4g) for %d epochs (patience)"
        name, epochs = monitor.metric.name, result.epochs
        log.info(message, best + 1, name, epochs[best][name], len(epochs) - 1 - best)


def log_test(test: Mapping[str, Any], best: int, monitored: EpochMetric) -> None:
    """Log the evaluation on the test split; `best` is the best epoch, counted from 1."""
    shown = {metric.name.removeprefix("test_"): metric for metric in list_main_test_metrics(monitored)}
    measured = {name: metric for name, metric in shown.items() if test.get(metric.name) is not None}
    values = " ".join(f"{name} {metric.format(test[metric.name])}" for name, metric in measured.items())
    log.info("test split  %s  (best weights, of epoch %d)", values, best)


def log_bottleneck(result: Result) -> None:
    """Log the bottleneck of training, with advice if there is any."""
    if not (measured := find_bottleneck(result)):
        return
    bottleneck, waiting_pct, steps = measured
    epochs = " (median of the epochs after the first)" if len(result.epochs) > 1 else ""
    advice = ""
    if bottleneck is Bottleneck.LAUNCH:
        advice = f"; {advise_on_launches(result)}"
    elif result.auto is None and bottleneck in (Bottleneck.INPUT, Bottleneck.BALANCED):
        advice = "; data/loader=auto measures which loader helps"
    log.info("%s%s%s", format_bottleneck(bottleneck, waiting_pct, steps), epochs, advice)
