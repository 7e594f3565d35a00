"""Measures this project on a CUDA GPU in less than ten minutes, and writes a Markdown file.

    python benchmarks/gpu.py                  writes outputs/gpu.md
    python benchmarks/gpu.py --dry-run        prints the commands; needs no GPU

The file is rewritten after each command. It also reports commands that fail or reach their time limit.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from rounds import create_parser, format_report, format_table

from vitmnist.runtime.device import choose_device
from vitmnist.tracking.environment import describe_environment

ROOT, DEVICE = Path(__file__).parent.parent, "cuda"
COMMAND_S, TOTAL_S = 150.0, 570.0  # Time limits of a command and of all commands (s)
INTERRUPT_S = 5.0  # Time for an interrupted command to print its results, such as the failures of pytest (s)
TRAIN = "python train.py data/loader=gpu_slice batch_size=500 epochs=3"
# On a slow machine, the last commands do not run.
COMMANDS = [
    "python -m pytest tests/gpu -m gpu -v -n0 --tb=short -k 'not compiled'",
    f"{TRAIN} trainer=plain",
    f"{TRAIN} trainer=fast",
    # The report compares the loader that `auto` chose with the measured times of all loaders.
    f"{TRAIN.replace(' data/loader=gpu_slice', '')} -m trainer=fast data/loader=auto,gpu_slice,ram,prefetch,cache",
    "python benchmarks/step.py --batch-size 500 5000 --rounds 2 --seconds 0.1 --only eager graph attention",
    "python benchmarks/epoch.py --rounds 1 --train-size 20000 --num-workers 8 --only hand ram gpu_slice prefetch disk",
    "python benchmarks/loaders.py --rounds 2 --train-size 20000",
    "python benchmarks/step.py --batch-size 500 --rounds 1 --seconds 0.1 --only compiled",
    "python benchmarks/pictures.py --device cuda --sides 224 --pictures 800 --rounds 2",
    "python -m pytest tests/gpu -m gpu -v -n0 --tb=short -k compiled",
    "python benchmarks/time_to_accuracy.py --seeds 1",
    "python benchmarks/epoch.py --batch-size 5000 --rounds 2 --only hand gpu_slice",
]


def run(command: str, limit_s: float) -> tuple[str, str]:
    """Run a command, interrupt it at the time limit, and kill its process group afterwards.

    Returns:
        How the command ended, and its output as Markdown: the page of a benchmark, otherwise the last lines.
    """
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    # Use files instead of pipes, because a child that outlives the command would keep a pipe open.
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        with subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=errors, start_new_session=True) as process:
            try:
                code = process.wait(limit_s)
                outcome = f"failed, exit code {code}" if code else "completed"
            except subprocess.TimeoutExpired:
                outcome = f"stopped after {limit_s:.0f} s"
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0), errors.seek(0)
        printed, failure = output.read(), errors.read()
    if outcome == "completed" and printed.startswith("# "):
        # The page goes below the heading of the command.
        return outcome, re.sub("^#", "###", printed, flags=re.MULTILINE)
    last = [*printed.splitlines()[-40:], *failure.splitlines()[-40:]]  # These include the completed rounds.
    return outcome, "\n".join(f"    {line}" for line in last)


def main() -> str | None:
    """Run all commands, and rewrite the file after each. Returns an error message if nothing can be measured."""
    parser = create_parser(__doc__, rounds=None)
    parser.set_defaults(output=ROOT / "outputs" / "gpu.md")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    arguments, device = parser.parse_args(), choose_device("auto")
    if arguments.dry_run:
        return print("\n".join(COMMANDS))
    if device.type != DEVICE:
        return "No CUDA device: torch sees none. --dry-run prints the commands."
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    environment, rows, parts, end = describe_environment(device), [], [], time.monotonic() + TOTAL_S
    for command in COMMANDS:
        limit_s = min(COMMAND_S, end - (began := time.monotonic()))
        print(f"{command}\n    at most {limit_s:.0f} s: ", end="", flush=True)
        outcome, printed = run(command, limit_s) if limit_s > 0 else ("skipped, no time left", "")
        print(outcome, flush=True)
        rows.append([f"`{command}`", outcome, f"{time.monotonic() - began:.0f}"])
        parts.append(f"## `{command}`\n\n{printed}")
        command_table = format_table(["command", "result", "s"], rows)
        page = format_report("Short runs on a GPU", environment, "", command_table, *parts)
        arguments.output.write_text(page, encoding="utf-8")
    return print(f"Please open an issue in the project's issue tracker and attach {arguments.output}.")


if __name__ == "__main__":
    sys.exit(main())
