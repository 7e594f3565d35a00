"""Times the start of imports, --help, a tiny run, and each further job of a sweep.

    python benchmarks/startup.py --output benchmarks/results/startup-cpu.md

The candidates are commands that take turns, each in its own process. Two rows are references: `import torch`, and the
minimum of any training script (import torch, build an Adam optimizer, take a step). The time of a further job is the
time of a sweep over five seeds, minus the time of a sweep over one seed, divided by four. The report also has the time
of an epoch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rounds import create_parser, format_report, format_spread, format_table, main, take_turns

from vitmnist.errors import UserError
from vitmnist.tracking.environment import describe_environment

ROOT = Path(__file__).parent.parent
PROGRAM = str(ROOT / "train.py")
TINY = ["data.dataset.train_size=600", "data.dataset.test_size=100", "epochs=1"]
FURTHER_JOBS = 4
IMPORT, MINIMUM, ONE_JOB, SWEEP = "import torch", "import torch, one Adam, one step", "sweep, 1 job", "sweep, 5 jobs"
STEP = (
    "import torch; model = torch.nn.Linear(784, 10); optimizer = torch.optim.Adam(model.parameters()); "
    "model(torch.rand(2, 784)).sum().backward(); optimizer.step()"
)
CANDIDATES = {
    IMPORT: ["-c", "import torch"],
    MINIMUM: ["-c", STEP],
    "from vitmnist import make_loader, load_dataset": ["-c", "from vitmnist import make_loader, load_dataset"],
    "import vitmnist.trainer": ["-c", "import vitmnist.trainer"],
    "train.py --help": [PROGRAM, "--help"],
    "train.py --cfg job": [PROGRAM, "--cfg", "job"],
    f"train.py {' '.join(TINY)}": [PROGRAM, *TINY],
    ONE_JOB: [PROGRAM, "-m", *TINY, "seed=0"],
    SWEEP: [PROGRAM, "-m", *TINY, f"seed={','.join(map(str, range(FURTHER_JOBS + 1)))}"],
}


def measure_command(arguments: list[str], folder: str, _round: int) -> float:
    """Return the seconds that `python ARGUMENTS` takes in `folder`."""
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, encoding="utf-8", check=False)
    if ended.returncode:
        raise UserError(ended.stderr.strip()[-2000:])
    return time.perf_counter() - started


def subtract(values: list[float], others: list[float]) -> list[float]:
    """Return the difference of the times of two commands in each round."""
    return [seconds - baseline for seconds, baseline in zip(values, others, strict=True)]


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds and return the report."""
    names = [name for name in CANDIDATES if name in (IMPORT, MINIMUM) or arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        turns = {name: partial(measure_command, CANDIDATES[name], folder) for name in names}
        times = take_turns(turns, arguments.rounds)
        results = [
            json.loads(path.read_text(encoding="utf-8")) for path in Path(folder, "outputs").rglob("result.json")
        ]
    rows = []
    for name, values in times.items():
        differences = [format_spread(subtract(values, times[reference]), 2) for reference in (IMPORT, MINIMUM)]
        rows.append([f"`{name}`", format_spread(values, 2), *differences])
    remarks = []
    if {ONE_JOB, SWEEP} <= times.keys():
        further = [seconds / FURTHER_JOBS for seconds in subtract(times[SWEEP], times[ONE_JOB])]
        rows.append(["a further job of the sweep", format_spread(further, 2), "", ""])
        epoch_s = median(epoch["epoch_s"] for result in results for epoch in result["epochs"])
        remarks = [f"The epoch of each run and each job takes {epoch_s:.2f} s (median)."]
    return format_report(
        "Start-up",
        describe_environment(torch.device("cpu")),
        f"Median and range of {arguments.rounds} rounds; each round runs each command once.",
        format_table(["command", "seconds", "more than `import torch`", "more than the first step"], rows),
        *remarks,
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=7)
    parser.add_argument("--only", default="", help="run the two references, and commands that contain this text")
    main(parser, compare)
