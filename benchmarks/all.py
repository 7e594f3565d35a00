"""Runs the benchmarks one after another, and writes `benchmarks/results`; this takes about an hour on two cores.

    python benchmarks/all.py
    python benchmarks/all.py --only pictures sweep      some of them

Do not run other programs at the same time. If a benchmark fails, its file is not changed, and the next benchmark runs.
"""

import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
# The first name has no apostrophe, because torch.compile writes the value of `--only` into generated code.
ARTICLES = ["trainer=fast", "article's loop, disk", "article's loop, RAM"]
# The script and arguments of each file, by its name without suffix
COMMANDS = {
    "epoch-cpu-bs500": ["epoch", "--batch-size=500", "--rounds=5", "--train-size=15000", "--compile"],
    "epoch-cpu-bs5000": [
        *("epoch", "--batch-size=5000", "--rounds=3", "--train-size=15000", "--compile"),
        *("--only", *ARTICLES),
    ],
    "loaders-cpu-bs500": ["loaders", "--batch-size=500"],
    "loaders-cpu-bs5000": ["loaders", "--batch-size=5000"],
    "pictures-cpu": ["pictures", "--pictures=2000"],
    "transforms-cpu": ["transforms", "--pictures=2000"],
    "step-cpu": ["step"],
    "startup-cpu": ["startup"],
    "time-to-accuracy-cpu": ["time_to_accuracy", "--seeds=3"],
}
SWEEP = [
    *("-m", "data/loader=disk,ram,gpu_slice,prefetch", "batch_size=100,500", "model=cnn", "repeats=5", "epochs=3"),
    *("data.dataset.train_size=6000", "data.dataset.test_size=1000"),
]


def run(name: str, program: list[str]) -> bool:
    """Run a benchmark. Returns whether it succeeded."""
    print(f"{name}: {' '.join(program)}", flush=True)
    return not subprocess.run([sys.executable, *program], cwd=FOLDER.parent, check=False).returncode


def sweep() -> bool:
    """Run the sweep of the README, keep its report, and draw the chart."""
    with TemporaryDirectory() as folder:
        if not run("sweep", ["train.py", *SWEEP, f"hydra.sweep.dir={folder}"]):
            return False
        for kind in ("md", "csv", "png"):
            shutil.copy(Path(folder) / f"report.{kind}", RESULTS / "sweep-cpu")
    table, pictures = RESULTS / "sweep-cpu" / "report.csv", FOLDER.parent / "docs" / "pictures"
    return run("chart", ["-m", "docs.scripts.loader_chart", str(table), str(pictures)])


def main(only: list[str]) -> None:
    """Run the benchmarks whose names begin with one of `only`. Exits with 1 if a benchmark fails."""
    failed = []
    for name, (script, *arguments) in COMMANDS.items():
        output = RESULTS / f"{name}.md"
        program = [f"benchmarks/{script}.py", *arguments, f"--output={output.relative_to(FOLDER.parent)}"]
        if name.startswith(tuple(only)) and not run(name, program):
            failed.append(name)
    if "sweep".startswith(tuple(only)) and not sweep():
        failed.append("sweep")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, usage="%(prog)s [--only NAME …]")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="prefixes of the files' names")
    main(parser.parse_args().only)
