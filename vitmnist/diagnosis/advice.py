"""What to change in a user's loader, concluded from what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from vitmnist.diagnosis.verdict import milliseconds, plural

NOTICEABLE_PCT = 5.0  # of the time, that the waits for the first batches of epochs must take
DECODE_ONCE = "use vitmnist.from_dataloader(loader), which decodes once and gives the same batches"
COMPARE = "import vitmnist\nvitmnist.diagnose(loader, step)"
PROFILE = (
    "with torch.profiler.profile() as profile: ...  # a few of your training steps\n"
    'print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))'
)


@dataclass(frozen=True)
class Advice:
    """What to change, with its measured reason, and what to run next."""

    text: str
    run_next: str


def advise(figures: dict[str, Any], cores: int, command: str) -> list[Advice]:
    """The advice for one loader.

    Args:
        figures: as `describe_loader` returns them, with the verdict.
        cores: how many this process may use.
        command: the command line of this measurement, to be repeated.
    """
    found, at_start = [], _start_of_epochs(figures, command)
    other_pct = figures["waiting_pct"] - figures["first_batches_pct"]
    if figures["verdict"].startswith("compute-bound"):
        share = 100 - figures["waiting_pct"]
        text = f"the loader is not the problem: {share:.0f}% of the time is in the step; profile the step"
        found.append(Advice(text, PROFILE))
    elif not at_start or other_pct >= figures["first_batches_pct"]:
        found.append(Advice(_workers(figures, cores), COMPARE))
    return found + at_start


def _workers(figures: dict[str, Any], cores: int) -> str:
    """Why batches come late, and what could make them faster."""
    workers, t1_s, step_s = figures["num_workers"], figures["t1_s"], figures["step_s"]
    # As many as make a batch per step, but no more than there are cores.
    enough = cores if t1_s is None else int(min(ceil(t1_s / max(step_s, 1e-6)), cores))
    more_workers = f"try num_workers={enough} ({cores} cores available)"
    if not workers:
        reason = "the main process makes each batch between two steps"
        reason += "" if t1_s is None else f", which takes {milliseconds(t1_s)}"
        return _text(figures, reason, more_workers)
    if t1_s is None:
        return _text(figures, "T1 is unknown", "measure the alternatives")
    reason = f"the {plural(workers, 'worker')} can make a batch every {milliseconds(figures['t1_per_worker_s'])}, "
    if figures["t1_per_worker_s"] <= step_s:
        reason += f"faster than the step of {milliseconds(step_s)}: batches arrive unevenly, or their copy to the "
        reason += "main process takes the time"
        return _text(figures, reason, "try a larger prefetch_factor")
    reason += f"slower than the step of {milliseconds(step_s)}"
    if enough > workers:
        return _text(figures, reason, more_workers)
    return _text(figures, f"{reason}, and none of the {plural(cores, 'core')} is free")


def _start_of_epochs(figures: dict[str, Any], command: str) -> list[Advice]:
    """Advice if the script waits noticeably for workers that start, or fill their queues, with each epoch."""
    later = figures["first_batches_s"][1:]
    if not later or not figures["num_workers"] or figures["first_batches_pct"] < NOTICEABLE_PCT:
        return []
    reason = (
        f"the first batch of an epoch takes {milliseconds(sum(later) / len(later))}, "
        f"{figures['first_batches_pct']:.0f}% of the time"
    )
    if figures["persistent_workers"] and figures["num_loaders"] == 1:
        return [Advice(_text(figures, reason, "make the epochs longer"), COMPARE)]
    once = "build the DataLoader once, before the epochs: " if figures["num_loaders"] > 1 else ""
    text = f"{reason}; {once}persistent_workers=True keeps the workers from one epoch to the next"
    return [Advice(text, f"the same command, with persistent_workers=True in the script:\n{command}")]


def _text(figures: dict[str, Any], reason: str, *changes: str) -> str:
    """The reason and the changes, and also to decode once, unless the data set cannot be read by index."""
    if figures["is_map_style"]:
        changes = (*changes, DECODE_ONCE)
    return f"{reason}; {', or '.join(changes)}" if changes else reason
