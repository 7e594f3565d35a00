"""The report on a user's script: figures for JSON, and a block of text per loader."""

from __future__ import annotations

import platform
import sys
from textwrap import indent
from typing import Any

import vitmnist
from vitmnist.diagnosis.advice import advise
from vitmnist.diagnosis.observation import Limits, Observation
from vitmnist.diagnosis.verdict import milliseconds, plural, verdict
from vitmnist.runtime.cpu import available_cores

NO_LOADER = (
    "no DataLoader was iterated in this process. Observed is torch.utils.data.DataLoader in the process that runs the "
    "script; processes that the script starts, and subclasses that replace __iter__, are not."
)


def describe_script(observations: list[Observation], limits: Limits, command: str, exit_code: int) -> dict[str, Any]:
    """The content of the JSON file: times in seconds, percentages 0 to 100, None for what is not known."""
    torch = sys.modules.get("torch")
    cores = available_cores()
    reason = _why_incomplete(observations, limits)
    return {
        "complete": reason is None,
        "reason": reason,
        "command": command,
        "exit_code": exit_code,
        "cuda_used": torch is not None and torch.cuda.is_initialized(),
        "cores": cores,
        "versions": {
            "python": platform.python_version(),
            "torch": None if torch is None else str(torch.__version__),
            "vitmnist": vitmnist.__version__,
        },
        "loaders": [describe_loader(observation, cores, command) for observation in observations],
    }


def _why_incomplete(observations: list[Observation], limits: Limits) -> str | None:
    if not observations:
        return NO_LOADER
    if any(observation.is_complete for observation in observations):
        return None
    most = max(observation.steps for observation in observations)
    if most:
        return f"the script ended after {most} of the {limits.steps} steps to observe"
    seen = max(observation.seen for observation in observations)
    if seen <= limits.warm_up:
        return f"no loader had enough batches: {seen} at most, of a warm-up of {limits.warm_up}; lower --warm-up"
    return (
        f"{seen} batches arrived, but after the warm-up no iterator was asked for another batch, which ends a step; "
        "iterate over the loader in a for loop"
    )


def describe_loader(observation: Observation, cores: int, command: str) -> dict[str, Any]:
    """What was measured of one loader, the verdict, and the advice."""
    steps, seen = observation.steps, observation.seen
    figures = {
        **observation.about,
        "num_loaders": observation.num_loaders,
        "complete": observation.is_complete,
        "warm_up": observation.limits.warm_up,
        "steps": steps,
        "batches_seen": seen,
        "first_batches_s": observation.first_batches_s,
        **dict.fromkeys(("first_batches_pct", "waiting_pct", "batch_s", "waiting_s", "step_s", "verdict")),
        **_time_to_make_a_batch(observation),
        "overhead_s": observation.overhead_s / seen if seen else None,
        "advice": [],
    }
    if steps:
        waiting_s, step_s = observation.waiting_s / steps, observation.step_s / steps
        batch_s = waiting_s + step_s
        figures |= {
            "first_batches_pct": 100 * observation.first_waiting_s / (steps * batch_s),
            "waiting_pct": 100 * waiting_s / batch_s,
            "batch_s": batch_s,
            "waiting_s": waiting_s,
            "step_s": step_s,
            "verdict": verdict(batch_s, waiting_s),
        }
        figures["advice"] = [vars(advice) for advice in advise(figures, cores, command)]
    return figures


def _time_to_make_a_batch(observation: Observation) -> dict[str, Any]:
    """T1, or the reason why it is not known."""
    batches, seconds = observation.made()
    workers, unknown, t1_s = observation.about["num_workers"], None, None
    method = observation.about["start_method"]
    if method not in (None, "fork"):
        unknown = f"workers started by {method} import torch again, without this measurement"
    elif batches:
        t1_s = seconds / batches
    else:
        unknown = "no batch was made while steps were observed; workers had made them before"
    per_worker_s = t1_s / workers if t1_s is not None and workers else None
    return {"t1_s": t1_s, "t1_per_worker_s": per_worker_s, "t1_unknown": unknown}


def format_report(report: dict[str, Any]) -> str:
    """The report as it is printed."""
    lines = [f"\nvitmnist.diagnose: the script ended with exit code {report['exit_code']}"]
    if report["reason"]:
        lines.append(f"incomplete: {report['reason']}")
    if report["cuda_used"]:
        lines.append("CUDA was used: times are on the host's clock, and a step may end before its kernels do")
    for number, figures in enumerate(report["loaders"], 1):
        lines += ["", *_format_loader(number, figures)]
    return "\n".join(lines)


def _format_loader(number: int, figures: dict[str, Any]) -> list[str]:
    size, workers = figures["batch_size"] or "unknown", figures["num_workers"]
    title = f"loader {number}: {figures['dataset']}, batch size {size}, num_workers={workers}, {figures['where']}"
    observed = f"{figures['steps']} steps after a warm-up of {figures['warm_up']}"
    rows = [("observed", f"{observed}, of {figures['batches_seen']} in all")]
    if figures["num_loaders"] > 1:
        alike = "with the same line, settings, and class and length of the data set; figures of all together"
        rows.append(("loaders", f"{figures['num_loaders']} in turn, {alike}"))
    if figures["steps"]:
        rows += [
            ("waiting", f"{figures['waiting_pct']:.0f}% of the time, {milliseconds(figures['waiting_s'])} per batch"),
            ("T1", _format_t1(figures)),
            ("step", milliseconds(figures["step_s"])),
        ]
    if figures["first_batches_s"]:
        rows.append(("first batch", _format_first_batches(figures)))
    if figures["steps"]:
        overhead_pct = 100 * figures["overhead_s"] / figures["batch_s"]
        rows += [
            ("overhead", f"{1e6 * figures['overhead_s']:.1f} µs per step ({overhead_pct:.2f}%) for this measurement"),
            ("verdict", figures["verdict"]),
        ]
    for advice in figures["advice"]:
        rows += [("advice", advice["text"]), ("next", advice["run_next"])]
    return [title, *(f"  {name:<12}{indent(text, ' ' * 14).lstrip()}" for name, text in rows)]


def _format_first_batches(figures: dict[str, Any]) -> str:
    first, *later = figures["first_batches_s"]
    text = f"{milliseconds(first)} in the first epoch"
    if later:
        text += f", {milliseconds(sum(later) / len(later))} in later ones (mean of {len(later)})"
    if figures["first_batches_pct"]:
        text += f"; {figures['first_batches_pct']:.0f}% of the time"
    return text


def _format_t1(figures: dict[str, Any]) -> str:
    if figures["t1_unknown"]:
        return f"unknown: {figures['t1_unknown']}"
    made = f"{milliseconds(figures['t1_s'])} to make a batch"
    if not figures["num_workers"]:
        return f"{made}, in the main process"
    workers = plural(figures["num_workers"], "worker")
    return f"{made}, by {workers}: a batch every {milliseconds(figures['t1_per_worker_s'])}"
