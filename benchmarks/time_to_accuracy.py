"""How long `experiment=speedrun` takes to its accuracy, and how sure that accuracy is: many seeds, three clocks.

    python benchmarks/time_to_accuracy.py --seeds 3 --output benchmarks/results/time-to-accuracy.md
    python benchmarks/time_to_accuracy.py --seeds 10 epochs=6 trainer.compile=true      overrides as train.py takes them

Each seed trains for a number of epochs that is fixed beforehand, in a process of its own, and is evaluated once, at its
end, on the test split: no epoch is chosen by what it reaches. The clocks:

    warm         from the first step to the accuracy, evaluation included. What is set up before: data, compiled code.
    warm cache   a whole process, from its start to its end, where earlier ones have left compiled code on disk.
    cold         a whole process that finds no compiled code. (Python's and the system's own caches stay.)
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tqdm import tqdm

from vitmnist.cli.messages import describe
from vitmnist.config.labels import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import typed
from vitmnist.errors import UserError

RECIPE = "experiment=speedrun"


def composed(overrides: list[str]) -> DictConfig:
    """The recipe with these overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [RECIPE, *overrides])


def train_once(overrides: list[str]) -> dict[str, Any]:
    """Train, evaluate once; the accuracy in percent, the seconds of the warm clock, and what it ran on."""
    from vitmnist.runtime.device import choose_device
    from vitmnist.runtime.distributed import ALONE
    from vitmnist.runtime.timer import synchronize
    from vitmnist.tracking.environment import describe_environment
    from vitmnist.training.loop import EpochProgress, evaluate, train_epoch
    from vitmnist.training.setup import build_setup

    config = typed(Config, composed(overrides))
    device = choose_device(config.device)
    with ExitStack() as stack:
        setup = build_setup(config, device, stack, ALONE)
        step, loader = setup.step, setup.train_loader
        setup.capture_graph()
        synchronize(device)
        started = time.perf_counter()
        for epoch in range(config.epochs):
            train_epoch(step, loader, EpochProgress(epoch, loader.sampler, device))
        metrics, _ = evaluate(step.eval_model, setup.eval_loader, setup.eval_preprocess)
        seconds = time.perf_counter() - started
    return {
        "accuracy": metrics["eval_acc"],
        "warm_s": seconds,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "trainer": setup.step_config.to_dict(),
        "environment": describe_environment(device),
    }


def in_process(overrides: list[str], cache: str) -> dict[str, Any]:
    """The same in a process of its own, whose compiled code is kept in `cache`; with its seconds as `process_s`.

    Raises:
        UserError: it failed; says why.
    """
    started = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, __file__, "--once", *overrides],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if ended.returncode:
        raise UserError(ended.stderr.strip().rpartition("\n")[2].rpartition(": error: ")[2])
    return {**json.loads(ended.stdout.splitlines()[-1]), "process_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="from 1 on")
    parser.add_argument("--cold", type=int, default=1, help="processes for the cold clock")
    parser.add_argument("--output", type=Path, help="write the table here too")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="as train.py takes them, on top of experiment=speedrun")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.cold < 1:
        parser.error("--seeds and --cold must be at least 1")
    if arguments.output and not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    try:
        if arguments.once:
            print(json.dumps(train_once(arguments.overrides)))
        else:
            measure(arguments)
    except Exception as error:
        failure = describe(error)
        if not failure.is_user_error:
            raise
        parser.error(failure.message)


def measure(arguments: argparse.Namespace) -> None:
    """Run the processes; print and write the table."""
    typed(Config, composed(arguments.overrides))  # a mistake is told before anything starts
    runs, cold = [], []
    bar = tqdm(total=arguments.cold + arguments.seeds, desc="process")
    with tempfile.TemporaryDirectory() as kept:
        for number in range(arguments.cold):
            with tempfile.TemporaryDirectory() as empty:
                # The last of them fills the cache that the others find.
                cache = kept if number + 1 == arguments.cold else empty
                cold.append(in_process([*arguments.overrides, "seed=0"], cache))
                bar.update()
        for seed in range(1, arguments.seeds + 1):
            runs.append(in_process([*arguments.overrides, f"seed={seed}"], kept))
            bar.update()
    bar.close()
    report = markdown(runs, cold)
    print(report, end="")
    if arguments.output:
        arguments.output.write_text(report)


def markdown(runs: list[dict[str, Any]], cold: list[dict[str, Any]]) -> str:
    """The tables, under the machine and the versions that they hold for."""
    machine, trainer = runs[0]["environment"], runs[0]["trainer"]
    accuracies = [run["accuracy"] for run in runs]
    options = ", ".join(f"{key}={value}" for key, value in trainer.items() if key != "reasons")
    clocks = {
        "warm": [run["warm_s"] for run in runs],
        "warm-cache process": [run["process_s"] for run in runs],
        "cold process": [run["process_s"] for run in cold],
    }
    lines = [
        f"# {RECIPE}: {runs[0]['epochs']} epochs at batch {runs[0]['batch_size']}",
        "",
        f"{date.today()}, {machine['gpu'] or machine['cpu']}, {machine['cpu_count']} CPU cores, "
        f"torch {machine['torch']}, Python {machine['python']}, commit {str(machine['git_commit'])[:10]}"
        f"{' and changes' if machine['git_dirty'] else ''}. trainer: {options}. "
        f"Written by `{shlex.join(['python', *sys.argv])}`.",
        "",
        "Accuracy on the test split, in percent, of the final weights; each seed is evaluated once.",
        "",
        "| seeds | mean | spread (standard deviation) | least | most | each |",
        "|---|---|---|---|---|---|",
        f"| {len(runs)} | {fmean(accuracies):.3f} | {spread(accuracies, 3)} | {min(accuracies):.2f} | "
        f"{max(accuracies):.2f} | {', '.join(f'{accuracy:.2f}' for accuracy in accuracies)} |",
        "",
        "| clock | runs | mean, s | spread, s |",
        "|---|---|---|---|",
        *(f"| {name} | {len(times)} | {fmean(times):.2f} | {spread(times, 2)} |" for name, times in clocks.items()),
    ]
    return "\n".join(lines) + "\n"


def spread(values: list[float], digits: int) -> str:
    """The standard deviation, where there are two or more values."""
    return f"{stdev(values):.{digits}f}" if len(values) > 1 else "–"


if __name__ == "__main__":
    main()
