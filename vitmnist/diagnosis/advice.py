"""What to change in a user's loader, concluded from what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from vitmnist.diagnosis.verdict import milliseconds, plural

NOTICEABLE_PCT = 5.0  # of the time, that the waits for the first batches of epochs must take
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
    elif figures["num_workers"] == 0:
        found.append(_without_workers(figures, cores))
    elif not at_start or other_pct >= figures["first_batches_pct"]:
        found.append(_with_workers(figures, cores))
    return found + at_start


def _without_workers(figures: dict[str, Any], cores: int) -> Advice:
    t1_s, workers = figures["t1_s"], cores
    reason = "the main process makes each batch between two steps"
    if t1_s is not None:
        reason += f", which takes {milliseconds(t1_s)}"
        workers = _enough_workers(figures, cores)
    text = f"{reason}; try num_workers={workers} ({cores} cores available)"
    return Advice(text + _decode_once(figures, ", or "), COMPARE)


def _with_workers(figures: dict[str, Any], cores: int) -> Advice:
    workers, per_batch_s = figures["num_workers"], figures["t1_per_worker_s"]
    if per_batch_s is None:
        return Advice("T1 is unknown; measure the alternatives" + _decode_once(figures, ", or "), COMPARE)
    if per_batch_s <= figures["step_s"]:
        text = (
            f"the {plural(workers, 'worker')} can make a batch every {milliseconds(per_batch_s)}, faster than the "
            f"step of {milliseconds(figures['step_s'])}: batches arrive unevenly, or their copy to the main process "
            f"takes the time; try a larger prefetch_factor"
        )
        return Advice(text + _decode_once(figures, ", or "), COMPARE)
    text = (
        f"the {plural(workers, 'worker')} can make a batch every {milliseconds(per_batch_s)}, slower than the step "
        f"of {milliseconds(figures['step_s'])}"
    )
    more = _enough_workers(figures, cores)
    if more > workers:
        text += f"; try num_workers={more} ({cores} cores available)" + _decode_once(figures, ", or ")
    else:
        text += f", and none of the {plural(cores, 'core')} is free" + _decode_once(figures, "; ")
    return Advice(text, COMPARE)


def _start_of_epochs(figures: dict[str, Any], command: str) -> list[Advice]:
    """Advice if the script waits noticeably for workers that start, or fill their queues, with each epoch."""
    later = figures["first_batches_s"][1:]
    if not later or not figures["num_workers"] or figures["first_batches_pct"] < NOTICEABLE_PCT:
        return []
    text = (
        f"the first batch of an epoch takes {milliseconds(sum(later) / len(later))}, "
        f"{figures['first_batches_pct']:.0f}% of the time; "
    )
    if figures["persistent_workers"] and figures["num_loaders"] == 1:
        return [Advice(f"{text}make the epochs longer{_decode_once(figures, ', or ')}", COMPARE)]
    once = "build the DataLoader once, before the epochs: " if figures["num_loaders"] > 1 else ""
    text += f"{once}persistent_workers=True keeps the workers from one epoch to the next"
    return [Advice(text, f"the same command, with persistent_workers=True in the script:\n{command}")]


def _enough_workers(figures: dict[str, Any], cores: int) -> int:
    """As many workers as make a batch per step, but no more than there are cores."""
    return int(min(ceil(figures["t1_s"] / max(figures["step_s"], 1e-6)), cores))


def _decode_once(figures: dict[str, Any], before: str) -> str:
    if not figures["is_map_style"]:
        return ""  # an iterable data set cannot be read by index
    return f"{before}use vitmnist.from_dataloader(loader), which decodes once and gives the same batches"
