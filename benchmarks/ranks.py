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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rounds import command_line, main, ratios, report, table, take_turns

from vitmnist.errors import UserError
from vitmnist.runtime.cpu import available_cores

PROGRAM = Path(__file__).parent.parent / "train.py"


def train(processes: int, overrides: list[str], number: int) -> dict[str, Any]:
    """Train with a number of processes, the same in every round; returns the content of `result.json`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), *overrides, f"hydra.run.dir={folder}/run"],
            env={**os.environ, "OMP_NUM_THREADS": str(max(available_cores() // processes, 1))},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise UserError(ended.stderr.strip()[-2000:])
        result: dict[str, Any] = json.loads(Path(folder, "run", "result.json").read_text())
    return result


def epoch_s(result: dict[str, Any]) -> float:
    """Median epoch time without the first epoch, including evaluation."""
    return float(result["summary"]["epoch_s_median"])


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds; the report."""
    if arguments.processes < 2:
        raise UserError("--processes must be at least 2")
    overrides = ["epochs=3", *arguments.overrides]
    results = take_turns(
        {processes: partial(train, processes, overrides) for processes in (1, arguments.processes)}, arguments.rounds
    )
    seconds = {processes: list(map(epoch_s, found)) for processes, found in results.items()}
    rows = [
        [str(processes), f"{median(seconds[processes]):.3g}", f"{found[0]['epochs'][-1]['train_loss']:.6f}"]
        for processes, found in results.items()
    ]
    first = results[1][0]
    return report(
        f"{arguments.processes} processes compared with one, batch {first['config']['batch_size']}",
        first["environment"],
        "",
        table(["processes", "epoch, s", "training loss of the last epoch"], rows),
        f"An epoch of {arguments.processes} processes over one of one process: "
        f"**{ratios(seconds[arguments.processes], seconds[1])}**, median and range of {arguments.rounds} rounds.",
    )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="to compare with one")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    main(parser, compare)
