"""What several processes cost that share one device's worth of work: torchrun beside one process, on the same cores.

    python benchmarks/ranks.py --rounds 5 --output benchmarks/results/ranks-cpu.md
    python benchmarks/ranks.py --processes 4 device=cuda batch_size=5000      on a machine with four GPUs: a speed-up

The program itself is started, in turn with one process and with several, and its own epoch times are read: each round
gives the median of a run's epochs without the first. On the CPU one process uses all cores, and each of N processes its
share of them, so that the ratio is the overhead; on GPUs, of which each process has one, it is the speed-up.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

PROGRAM = Path(__file__).parent.parent / "train.py"


def start(processes: int, overrides: list[str]) -> dict[str, Any]:
    """Train with so many processes; `result.json`."""
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
    """The median of a run's epochs without the first, evaluation included."""
    return float(result["summary"]["epoch_s_median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the table here too")
    parser.add_argument("overrides", nargs="*", help="as train.py takes them")
    arguments = parser.parse_args()
    if arguments.processes < 2 or arguments.rounds < 1:
        parser.error("--processes must be at least 2, and --rounds at least 1")
    overrides = ["epochs=3", *arguments.overrides]
    rounds = []
    for number in tqdm(range(arguments.rounds), desc="round"):
        turn = (1, arguments.processes) if number % 2 else (arguments.processes, 1)  # no place is always the first
        rounds.append({processes: start(processes, overrides) for processes in turn})
    report = markdown(rounds, arguments.processes)
    print(report, end="")
    if arguments.output:
        arguments.output.write_text(report)


def markdown(rounds: list[dict[int, dict[str, Any]]], processes: int) -> str:
    """The table, under the machine and the versions that it holds for."""
    one = rounds[0][1]
    machine, config = one["environment"], one["config"]
    ratios = [epoch_s(results[processes]) / epoch_s(results[1]) for results in rounds]
    losses = {count: results[-1]["train_loss"] for count in (1, processes) if (results := rounds[0][count]["epochs"])}
    header = ["processes", "epoch, s", "training loss of the last epoch"]
    rows = [
        [count, f"{median(epoch_s(results[count]) for results in rounds):.3g}", f"{losses[count]:.6f}"]
        for count in (1, processes)
    ]
    return "\n".join(
        [
            f"# {processes} processes beside one, batch {config['batch_size']}",
            "",
            f"{date.today()}, {machine['gpu'] or machine['cpu']}, {machine['cpu_count']} CPU cores, "
            f"torch {machine['torch']}, Python {machine['python']}, commit {str(machine['git_commit'])[:10]}"
            f"{' and changes' if machine['git_dirty'] else ''}. Written by `{shlex.join(['python', *sys.argv])}`.",
            "",
            str(tabulate(rows, header, "github", disable_numparse=True)),
            "",
            f"An epoch of {processes} processes over one of one process: **{median(ratios):.3f}** "
            f"({min(ratios):.3f}–{max(ratios):.3f}), median and range of {len(rounds)} rounds.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
