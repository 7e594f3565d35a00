"""Measures the time and the accuracy of `experiment=speedrun` over several seeds.

    python benchmarks/time_to_accuracy.py --seeds 3 --output benchmarks/results/time-to-accuracy.md
    python benchmarks/time_to_accuracy.py --seeds 10 epochs=6 trainer.compile=true      with overrides, as for train.py

Each seed trains for a fixed number of epochs in its own process, and is evaluated once, at the end, on the test split,
so no epoch is selected by its accuracy. There are three times:

    warm                 from the first step to the end of the evaluation, without set-up (reading data, compilation)
    warm-cache process   a whole process, with the compiled code of earlier processes on disk
    cold process         a whole process without compiled code (the caches of Python and the operating system are kept)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from loops import build_run
from rounds import create_parser, format_report, format_table, main, positive_int
from tqdm import tqdm

from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import UserError
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment
from vitmnist.training.loop import evaluate, train_epoch
from vitmnist.training.progress import EpochProgress

RECIPE = "experiment=speedrun"


def train_once(overrides: list[str]) -> dict[str, Any]:
    """Train and evaluate once; return the accuracy in percent, the warm time in seconds, options and environment."""
    with ExitStack() as stack:
        epochs = validate(Config, compose([RECIPE, *overrides])).epochs
        _, step, loader, eval_loader = build_run([RECIPE, *overrides], stack)
        synchronize(step.device)
        start = time.perf_counter()
        for epoch in range(epochs):
            train_epoch(step, loader, EpochProgress(epoch, loader.sampler, step.device))
        metrics = evaluate(step.evaluated_model, eval_loader, step.preprocess).metrics
        seconds = time.perf_counter() - start
    return {
        "accuracy": metrics["eval_acc"],
        "warm_s": seconds,
        "epochs": epochs,
        "batch_size": loader.sampler.batch_size,
        "trainer": asdict(step.runner.options),
        "environment": describe_environment(step.device),
    }


def train_in_process(overrides: list[str], cache: str) -> dict[str, Any]:
    """Call `train_once` in a process that stores its compiled code in `cache`; add the duration of the process.

    Raises:
        UserError: the process failed.
    """
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, __file__, "--once", *overrides],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    seconds = time.perf_counter() - start
    if ended.returncode:
        raise UserError(ended.stderr.strip().rpartition("\n")[2].rpartition(": error: ")[2])
    return {**json.loads(ended.stdout.splitlines()[-1]), "process_s": seconds}


def measure(arguments: argparse.Namespace) -> str:
    """Run the processes and return the report. With `--once`, train in this process and return its result as JSON."""
    if arguments.once:
        return json.dumps(train_once(arguments.overrides)) + "\n"
    validate(Config, compose([RECIPE, *arguments.overrides]))  # Report errors before anything starts.
    runs, cold = [], []
    bar = tqdm(total=arguments.cold + arguments.seeds, desc="process")
    with tempfile.TemporaryDirectory() as shared:
        for number in range(arguments.cold):
            with tempfile.TemporaryDirectory() as empty:
                # The last cold process fills the cache for the warm processes.
                cache = shared if number + 1 == arguments.cold else empty
                cold.append(train_in_process([*arguments.overrides, "seed=0"], cache))
                bar.update()
        for seed in range(1, arguments.seeds + 1):
            runs.append(train_in_process([*arguments.overrides, f"seed={seed}"], shared))
            bar.update()
    bar.close()
    return format_results(runs, cold)


def format_results(runs: list[dict[str, Any]], cold: list[dict[str, Any]]) -> str:
    """Format the report from the results of the warm and the cold processes."""
    first, accuracies = runs[0], [run["accuracy"] for run in runs]
    options = ", ".join(f"{key}={value}" for key, value in first["trainer"].items() if key != "reasons")
    times_by_kind = {
        "warm": [run["warm_s"] for run in runs],
        "warm-cache process": [run["process_s"] for run in runs],
        "cold process": [run["process_s"] for run in cold],
    }
    accuracy_row = [
        str(len(runs)),
        f"{fmean(accuracies):.3f}",
        format_deviation(accuracies, 3),
        f"{min(accuracies):.2f}",
        f"{max(accuracies):.2f}",
        ", ".join(f"{accuracy:.2f}" for accuracy in accuracies),
    ]
    return format_report(
        f"{RECIPE}: {first['epochs']} epochs at batch size {first['batch_size']}",
        first["environment"],
        f"trainer: {options}.",
        "Accuracy on the test split, in percent, of the final weights; each seed is evaluated once.",
        format_table(["seeds", "mean", "standard deviation", "lowest", "highest", "all"], [accuracy_row]),
        format_table(
            ["time", "runs", "mean, s", "standard deviation, s"],
            [
                [name, str(len(times)), f"{fmean(times):.2f}", format_deviation(times, 2)]
                for name, times in times_by_kind.items()
            ],
        ),
    )


def format_deviation(values: list[float], digits: int) -> str:
    """Format the standard deviation, if there are two or more values."""
    return f"{stdev(values):.{digits}f}" if len(values) > 1 else "–"


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=None)
    parser.add_argument("--seeds", type=positive_int, default=3, help="number of seeds, starting at 1")
    parser.add_argument("--cold", type=positive_int, default=1, help="number of cold processes")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="overrides as for train.py, on top of experiment=speedrun")
    main(parser, measure)
