"""The report on a script, as text and as dataclasses that `--json` writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import inf

from vitmnist.diagnosis.observed_loader import LoaderInfo, ObservedLoader, sum_passes
from vitmnist.diagnosis.observer import Observer
from vitmnist.timing.table import (
    COMPUTE_BOUND_PCT,
    NOTICEABLE_SHARE,
    Bottleneck,
    LoaderTiming,
    format_bottleneck,
    format_ms,
    format_seconds,
    format_timings,
)

NO_LOADER = "no DataLoader was iterated in this process before the script's last statement had ended"
"""The reason for a report without loaders."""
NO_BATCHES = "there were no batches after the warm-up; lower --warm-up"
"""The reason for a report without measurements, if there were loaders."""


@dataclass
class ObservedLoaderReport:
    """A loop over a loader. Times are in seconds, percentages from 0 to 100.

    Args:
        seconds: duration of all passes, where overlapping passes count once.
        waiting_pct: None if the loop runs in another thread than the main thread.
        step_s: duration of the median step.
        seconds_by_stage: time per sample of reading, of each transform, and of collating.
        timings: the loader in use and its alternatives, timed with an imitated step after the script.
        change: line of code for the best alternative; None if no alternative saves much.
    """

    info: LoaderInfo
    passes: int
    batches: int
    seconds: float
    waiting_s: float
    waiting_pct: float | None
    step_s: float
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    timings: list[LoaderTiming] = field(default_factory=list)
    change: str | None = None

    @classmethod
    def from_observed(cls, loader: ObservedLoader, end_time: float) -> ObservedLoaderReport:
        """Summarise what was measured until `end_time`."""
        seconds = sum_passes([loader], end_time)
        passes = sum(p.batches > 0 for p in loader.passes)
        pct = None if loader.is_in_other_thread else 100 * loader.waiting_s / seconds
        return cls(loader.info, passes, loader.batches, seconds, loader.waiting_s, pct, loader.step_s)


@dataclass(frozen=True)
class Report:
    """A script and its loaders. Times are in seconds, percentages from 0 to 100. Unknown values are None.

    Args:
        stopped: whether `--stop` ended the script.
        steps: number of batches after the warm-up, of the loader that delivered most batches.
        incomplete: why nothing was measured.
        seconds: duration of all passes, where overlapping passes count once.
    """

    exit_code: int
    stopped: bool
    rank: int | None
    warm_up: int
    steps: int
    incomplete: str | None
    seconds: float
    waiting_s: float
    waiting_pct: float | None
    bottleneck: Bottleneck | None
    loaders: list[ObservedLoaderReport]


def describe_script(observer: Observer, exit_code: int) -> Report:
    """Summarise the observations of a script, and time other loaders for each loop that waits for data."""
    end_time = observer.end_time or inf
    loaders = [loader for loader in observer.loaders if loader.batches and observer.warm_up_done]
    reports = [ObservedLoaderReport.from_observed(loader, end_time) for loader in loaders]
    steps = max((loader.batches for loader in loaders), default=0)
    seconds = sum_passes(loaders, end_time)
    waiting_s = sum(loader.waiting_s for loader in loaders)
    waiting_pct, bottleneck = None, None
    if loaders and not any(loader.is_in_other_thread for loader in loaders):
        waiting_pct = 100 * waiting_s / seconds
        bottleneck = Bottleneck.of(waiting_pct, steps)
    if bottleneck in (Bottleneck.INPUT, Bottleneck.BALANCED) and exit_code == 0:
        # Import here, because most scripts do not need these modules.
        from vitmnist.diagnosis.candidates import find_best_change, time_alternatives

        longest_s = max(loader.waiting_s for loader in loaders)
        for loader, report in zip(loaders, reports, strict=True):
            if report.waiting_s >= longest_s / 2 and (report.waiting_pct or 0.0) >= COMPUTE_BOUND_PCT:
                report.timings, report.seconds_by_stage = time_alternatives(loader)
                report.change = find_best_change(report.timings, inf if observer.is_stopped else report.passes)
    return Report(
        exit_code=exit_code,
        stopped=observer.is_stopped,
        rank=int(os.environ["RANK"]) if "RANK" in os.environ else None,
        warm_up=observer.warm_up,
        steps=steps,
        incomplete=None if steps else NO_BATCHES if observer.loaders else NO_LOADER,
        seconds=seconds,
        waiting_s=waiting_s,
        waiting_pct=waiting_pct,
        bottleneck=bottleneck,
        loaders=reports,
    )


def format_report(report: Report) -> str:
    rank = "" if report.rank is None else f", rank {report.rank}"
    outcome = "was stopped by --stop" if report.stopped else f"ended with exit code {report.exit_code}"
    lines = [f"\nvitmnist diagnose{rank}: the script {outcome}"]
    if report.incomplete:
        lines.append(f"incomplete: {report.incomplete}")
    if report.seconds:
        steps = f"{report.steps} batches" + (f" after a warm-up of {report.warm_up}" if report.warm_up else "")
        lines.append(f"script: {steps} in {format_seconds(report.seconds)} s")
    if report.bottleneck and report.waiting_pct is not None:
        lines.append("verdict: " + format_bottleneck(report.bottleneck, report.waiting_pct, report.steps))
    for index, loader in enumerate(report.loaders, 1):
        lines += ["", *_format_loader(index, loader)]
    return "\n".join(lines)


def _format_loader(index: int, loader: ObservedLoaderReport) -> list[str]:
    info = loader.info
    size = f"batch size {info.batch_size or 'unknown'}, num_workers={info.num_workers}"
    samples = "" if info.samples is None else f" {info.samples:,} samples,"
    share = "in another thread" if loader.waiting_pct is None else f"{loader.waiting_pct:.0f}%"
    waiting = f"waiting {share} of {format_seconds(loader.seconds)} s, a step {format_ms(loader.step_s)}"
    passes = "1 pass" if loader.passes == 1 else f"{loader.passes} passes"
    lines = [
        f"loader {index}: {info.dataset},{samples} {size} ({info.where})",
        f"  {loader.batches} batches in {passes}: {waiting}",
    ]
    if total_s := sum(loader.seconds_by_stage.values()):
        shares = sorted(((seconds / total_s, name) for name, seconds in loader.seconds_by_stage.items()), reverse=True)
        shown = [f"{name} {share:.0%}" for share, name in shares if share > NOTICEABLE_SHARE]
        lines.append(f"  a sample: {', '.join(shown)}")
    if loader.timings:
        lines += [f"  {line}" for line in format_timings(loader.timings).splitlines()]
        lines += [f"  change  {info.where}   {loader.change}"] if loader.change else []
        lines.append("  (expected, with an imitated step)")
    return lines
