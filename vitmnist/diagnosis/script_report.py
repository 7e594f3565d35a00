"""The report on a user's script: figures for JSON, and text: a line for the script, and a block per loader."""

from __future__ import annotations

import gc
import os
import sys
from operator import itemgetter
from textwrap import indent
from typing import Any

from vitmnist.diagnosis.advice import advise_on_loader, advise_on_script
from vitmnist.diagnosis.observer import Observer
from vitmnist.diagnosis.timeline import Timeline
from vitmnist.diagnosis.verdict import FEW_STEPS, milliseconds, plural, verdict
from vitmnist.runtime.cpu import NOTICEABLE, Cores

NO_LOADER = "no DataLoader was iterated in this process before the script's last statement had ended"
OTHER_PROCESSES = (
    "they may be what trains, so there is no verdict; ranks of torchrun are observed by torchrun -m vitmnist diagnose …"
)


def describe_script(observer: Observer, command: str, exit_code: int) -> dict[str, Any]:
    """The content of the JSON file: times in seconds, percentages 0 to 100, None for what is not known."""
    torch, time = sys.modules.get("torch"), observer.time
    reason = _why_incomplete(observer)
    report: dict[str, Any] = {
        "complete": reason is None,
        "reason": reason,
        "command": command,
        "exit_code": exit_code,
        "stopped": time.is_stopped,
        "rank": _rank(),
        "processes_not_observed": observer.processes,
        "cuda_used": torch is not None and torch.cuda.is_initialized(),
        "warm_up": time.skipped,
        "steps": time.steps,
        **dict.fromkeys(
            ("seconds", "before_s", "between_s", "after_s", "waiting_s", "waiting_pct", "work_s", "cores", "verdict")
        ),
        "advice": [],
    }
    loaders = [
        one.figures() | {"waiting_pct": None, "restarts_pct": None, "parts": {}, "advice": []}
        for one in time.observations
    ]
    passes = time.passes()
    if passes and any(observation.batches for observation in time.observations):
        cores = time.cores()
        report |= _durations(time, passes) | {"cores": cores and vars(cores)}
        if time.steps and not time.is_threaded:  # another thread may hold batches ahead
            _add_shares(report, loaders, time, cores)
        if cores and report["verdict"] and time.steps >= FEW_STEPS and exit_code == 0:
            report["advice"] = advise_on_script(report["waiting_pct"], cores)
            for figures, observation in zip(loaders, time.observations, strict=True):
                figures["advice"] = advise_on_loader(figures, report | {"loaders": loaders}, cores, observation.source)
    return report | {"loaders": loaders}


def _durations(time: Timeline, passes: list[list[float]]) -> dict[str, float]:
    """How long the passes take, and the script before, between and after them."""
    (began, _), (_, ended) = passes[0], passes[-1]
    seconds = sum(end - begin for begin, end in passes)
    return {
        "seconds": seconds - time.measuring_s,
        "before_s": (time.first_pass or began) - time.started,
        "between_s": ended - began - seconds,
        "after_s": (time.ended or ended) - ended,
    }


def _add_shares(report: dict[str, Any], loaders: list[dict[str, Any]], time: Timeline, cores: Cores | None) -> None:
    """Add how long the script waits; no verdict if other processes may be what trains."""
    seconds = report["seconds"]
    waiting_pct = 100 * time.waiting_s / seconds
    report |= {
        "waiting_s": time.waiting_s,
        "waiting_pct": waiting_pct,
        "work_s": max(0.0, seconds - time.waiting_s) / time.steps,
        "verdict": None if report["processes_not_observed"] else verdict(waiting_pct, time.steps, cores),
    }
    for figures in loaders:
        figures["waiting_pct"] = 100 * figures["waiting_s"] / seconds
        figures["restarts_pct"] = 100 * figures["restarts_s"] / seconds


def _why_incomplete(observer: Observer) -> str | None:
    time = observer.time
    if not time.observations:
        return NO_LOADER + _other_loaders()
    if threaded := [one.about["where"] for one in time.observations if one.in_other_thread]:
        return (
            f"the loader of {', '.join(threaded)} is iterated in another thread than the main one, so that how long "
            "the script waits for its batches is not known"
        )
    if time.limits.steps is not None and 0 < time.steps < time.limits.steps:
        return f"the script ended after {time.steps} of the {time.limits.steps} steps to observe"
    if not time.steps:
        seen = max(observation.batches_seen for observation in time.observations)
        return f"there were too few batches: {seen}, of a warm-up of {time.limits.warm_up}; lower --warm-up"
    return None


def _other_loaders() -> str:
    """The classes of loaders that exist and are not observed, by their names."""
    kinds = {type(one) for one in gc.get_objects() if type(one).__name__.endswith("Loader")}
    torch = sys.modules.get("torch.utils.data")
    names = [
        f"{kind.__module__}.{kind.__name__}"
        for kind in kinds
        if hasattr(kind, "__iter__") and not (torch and issubclass(kind, torch.DataLoader))
    ]
    return f"; not observed: {', '.join(sorted(names))}, which is none of torch.utils.data" if names else ""


def _rank() -> str | None:
    """The rank of this process and the number of ranks, as torchrun and others set them."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    return None if rank is None or size == "1" else f"{rank} of {size}"


def why_failed(report: dict[str, Any], limit: float) -> str | None:
    """Why `--fail-above` fails: the script waits for more than `limit` percent of its time, or that is not known."""
    if report["waiting_pct"] is None:
        return f"failed: nothing was measured to compare with --fail-above {limit:g}%"
    if report["waiting_pct"] <= limit:
        return None
    return f"failed: waiting takes {report['waiting_pct']:.1f}% of the time, which exceeds --fail-above {limit:g}%"


def format_report(report: dict[str, Any]) -> str:
    """The report as it is printed."""
    rank = f", rank {report['rank']}" if report["rank"] else ""
    ended = f"ended with exit code {report['exit_code']}"
    lines = [f"\nvitmnist diagnose{rank}: the script {'was stopped, as --stop says' if report['stopped'] else ended}"]
    if report["reason"]:
        lines.append(f"incomplete: {report['reason']}")
    if count := report["processes_not_observed"]:
        processes = "1 Python process" if count == 1 else f"{count} Python processes"
        lines.append(f"not observed: {processes} that the script has started; {OTHER_PROCESSES}")
    if report["cuda_used"]:
        lines.append("CUDA was used: times are on the host's clock, and a step may end before its kernels do")
    numbered = [*enumerate((figures for figures in report["loaders"] if figures["batches"]), 1)]
    if report["seconds"] is not None:
        lines.append(f"script: {_format_script(report, numbered)}")
        lines += _format_rest(report)
    if report["verdict"]:
        lines += [f"verdict: {report['verdict']}", *_format_advice(report["advice"])]
        if report["exit_code"]:
            lines.append("no advice, because the script failed: its samples are not read again")
    for number, figures in numbered:
        lines += ["", *_format_loader(number, figures)]
    return "\n".join(lines)


def _format_script(report: dict[str, Any], loaders: list[tuple[int, dict[str, Any]]]) -> str:
    """One line: the time, the share of it that the script waited for all loaders and for each, and the cores."""
    seconds, cores = report["seconds"], report["cores"]
    warm_up = f"after a warm-up of {report['warm_up']}" if report["warm_up"] else "with the warm-up"  # see `Timeline`
    parts = [f"{plural(report['steps'], 'step')} in {seconds:.3g} s {warm_up}"]
    if report["waiting_pct"] is not None:
        shares = ", ".join(f"loader {number} {figures['waiting_pct']:.0f}%" for number, figures in loaders)
        parts.append(f"waiting {report['waiting_pct']:.0f}% of the time ({shares})")
        parts.append(f"work {milliseconds(report['work_s'])} per step")
    if cores:
        in_workers = f", {cores['workers']:.1f} of them in its workers" if cores["workers"] >= 0.05 else ""
        parts.append(f"{cores['busy']:.1f} of {cores['available']} cores busy{in_workers}")
    return "; ".join(parts)


def _format_rest(report: dict[str, Any]) -> list[str]:
    """A line for the time outside of passes, as far as it is noticeable."""
    times = [(report["before_s"], "before"), (report["between_s"], "between"), (report["after_s"], "after")]
    parts = [f"{seconds:.3g} s {where}" for seconds, where in times if seconds > NOTICEABLE * report["seconds"]]
    return [f"not counted: {', '.join(parts)} the passes over the loaders"] if parts else []


def _format_loader(number: int, figures: dict[str, Any]) -> list[str]:
    size, workers = figures["batch_size"] or "unknown", figures["num_workers"]
    samples = "" if figures["samples"] is None else f" of {figures['samples']:,} samples"
    sampler = f", {figures['sampler']}" if figures["sampler"] else ""
    title = f"loader {number}: {figures['dataset']}{samples}{sampler}, batch size {size}, num_workers={workers}, "
    title += figures["where"]
    batches, per_batch_s = figures["batches"], figures["waiting_s"] / figures["batches"]
    warm_up = f" after {figures['warm_up_batches']} of the warm-up" if figures["warm_up_batches"] else ""
    rows = [("observed", f"{batches} batches{warm_up}")]
    if figures["num_loaders"] > 1:
        alike = "with the same line, settings, and class and length of the dataset; figures of all together"
        rows.append(("loaders", f"{figures['num_loaders']} in turn, {alike}"))
    if figures["in_other_thread"]:
        rows.append(("delivers", f"a batch in {milliseconds(per_batch_s)}, to another thread than the main one"))
    elif figures["waiting_pct"] is not None:
        rows.append(("waiting", f"{figures['waiting_pct']:.0f}% of the time, {milliseconds(per_batch_s)} per batch"))
    if total_s := sum(figures["parts"].values()):
        parts = sorted(figures["parts"].items(), key=itemgetter(1), reverse=True)
        shares = [f"{name} {100 * part_s / total_s:.0f}%" for name, part_s in parts if part_s > NOTICEABLE * total_s]
        rows.append(("a sample", f"{milliseconds(total_s)} in one process: {', '.join(shares)}"))
    if figures["restarts_pct"] and workers:
        rows.append(("restarts", f"{figures['restarts_pct']:.0f}% of the time, in the starts and ends of epochs"))
    return [title, *_format_rows(rows), *_format_advice(figures["advice"])]


def _format_advice(advice: list[dict[str, str]]) -> list[str]:
    return _format_rows([row for one in advice for row in (("advice", one["text"]), ("next", one["run_next"]))])


def _format_rows(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{indent(text, ' ' * 14).lstrip()}" for name, text in rows]
