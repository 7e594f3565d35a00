"""What it costs, or gains, to train in several processes: torchrun next to one process, on the same cores.

    python benchmarks/ranks.py --rounds 5 --output benchmarks/results/ranks-cpu.md
    python benchmarks/ranks.py --processes 4 device=cuda batch_size=5000      on a machine with four GPUs: the speed-up

Starts train.py alternately in one process and in several, and reads the recorded epoch times: each round takes the
median of a run's epochs without the first. On the CPU one process uses all cores, and each of N processes an N-th of
them, so that the ratio is the overhead; on GPUs, one per process, it is the speed-up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rounds import check_output, describe, publish, ratio, rotated
from tabulate import tabulate
from tqdm import tqdm

PROGRAM = Path(__file__).parent.parent / "train.py"


def train(processes: int, overrides: list[str]) -> dict[str, Any]:
    """Train with a number of processes; returns the content of `result.json`."""
    cores = len(os.sched_getaffinity(0))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), *overrides, f"hydra.run.dir={folder}/run"],
            env={**os.environ, "OMP_NUM_THREADS": str(max(cores // processes, 1))},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"error: {ended.stderr.strip()[-2000:]}")
        result: dict[str, Any] = json.loads(Path(folder, "run", "result.json").read_text())
    return result


def epoch_s(result: dict[str, Any]) -> float:
    """Median epoch time without the first epoch, including evaluation."""
    return float(result["summary"]["epoch_s_median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="to compare with one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    if arguments.processes < 2 or arguments.rounds < 1:
        parser.error("--processes must be at least 2, and --rounds at least 1")
    check_output(parser, arguments.output)
    overrides = ["epochs=3", *arguments.overrides]
    counts = [1, arguments.processes]
    rounds = [
        {processes: train(processes, overrides) for processes in rotated(counts, number)}
        for number in tqdm(range(arguments.rounds), desc="round")
    ]
    publish(markdown(rounds, arguments.processes), arguments.output)


def markdown(rounds: list[dict[int, dict[str, Any]]], processes: int) -> str:
    """The report."""
    first = rounds[0][1]
    ratios = [epoch_s(results[processes]) / epoch_s(results[1]) for results in rounds]
    rows = []
    for count in (1, processes):
        seconds = median(epoch_s(results[count]) for results in rounds)
        rows.append([count, f"{seconds:.3g}", f"{rounds[0][count]['epochs'][-1]['train_loss']:.6f}"])
    header = ["processes", "epoch, s", "training loss of the last epoch"]
    lines = [
        f"# {processes} processes compared with one, batch {first['config']['batch_size']}",
        "",
        describe(first["environment"]),
        "",
        str(tabulate(rows, header, "github", disable_numparse=True)),
        "",
        f"An epoch of {processes} processes over one of one process: **{ratio(ratios)}**, median and range of "
        f"{len(rounds)} rounds.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
