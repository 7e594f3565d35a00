"""What a start costs: imports, --help, a tiny run, and each further job of a sweep.

    python benchmarks/startup.py --output benchmarks/results/startup-cpu.md

Every candidate is a command in a process of its own; they take turns. Two rows are the reference: `import torch`, and
the least that any training script does (import torch, build one Adam, take one step). A further job is the time of a
sweep over five seeds, minus that of a sweep over one, divided by four; the table also says how long its epochs took.
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
IMPORT, FLOOR, ONE_JOB, SWEEP = "import torch", "import torch, one Adam, one step", "sweep, 1 job", "sweep, 5 jobs"
STEP = (
    "import torch; model = torch.nn.Linear(784, 10); optimizer = torch.optim.Adam(model.parameters()); "
    "model(torch.rand(2, 784)).sum().backward(); optimizer.step()"
)
CANDIDATES = {
    IMPORT: ["-c", "import torch"],
    FLOOR: ["-c", STEP],
    "from vitmnist import make_loader, load_dataset": ["-c", "from vitmnist import make_loader, load_dataset"],
    "import vitmnist.trainer": ["-c", "import vitmnist.trainer"],
    "train.py --help": [PROGRAM, "--help"],
    "train.py --cfg job": [PROGRAM, "--cfg", "job"],
    f"train.py {' '.join(TINY)}": [PROGRAM, *TINY],
    ONE_JOB: [PROGRAM, "-m", *TINY, "seed=0"],
    SWEEP: [PROGRAM, "-m", *TINY, f"seed={','.join(map(str, range(FURTHER_JOBS + 1)))}"],
}


def seconds(arguments: list[str], folder: str, number: int) -> float:
    """Return the seconds that `python ARGUMENTS` takes in `folder`. The number of the round is unused."""
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, encoding="utf-8", check=False)
    if ended.returncode:
        raise UserError(ended.stderr.strip()[-2000:])
    return time.perf_counter() - started


def subtract(values: list[float], others: list[float]) -> list[float]:
    """Return how much longer a command took than another, round by round."""
    return [seconds - baseline for seconds, baseline in zip(values, others, strict=True)]


def compare(arguments: argparse.Namespace) -> str:
    """Run the rounds and return the report."""
    names = [name for name in CANDIDATES if name in (IMPORT, FLOOR) or arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        times = take_turns({name: partial(seconds, CANDIDATES[name], folder) for name in names}, arguments.rounds)
        results = [
            json.loads(path.read_text(encoding="utf-8")) for path in Path(folder, "outputs").rglob("result.json")
        ]
    rows = []
    for name, values in times.items():
        beyond = [format_spread(subtract(values, times[reference]), 2) for reference in (IMPORT, FLOOR)]
        rows.append([f"`{name}`", format_spread(values, 2), *beyond])
    remarks = []
    if {ONE_JOB, SWEEP} <= times.keys():
        further = [seconds / FURTHER_JOBS for seconds in subtract(times[SWEEP], times[ONE_JOB])]
        rows.append(["a further job of the sweep", format_spread(further, 2), "", ""])
        epoch_s = median(epoch["epoch_s"] for result in results for epoch in result["epochs"])
        remarks = [f"Each run and each job contains an epoch, of {epoch_s:.2f} s (median)."]
    return format_report(
        "Start-up",
        describe_environment(torch.device("cpu")),
        f"Median and range of {arguments.rounds} rounds, each command once in each.",
        format_table(["command", "seconds", "beyond `import torch`", "beyond the first step"], rows),
        *remarks,
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=7)
    parser.add_argument("--only", default="", help="the two references, and the commands whose text contains this")
    main(parser, compare)
