"""What a change of a loader would cost and save: each is timed before it is advised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from vitmnist.diagnosis.epochs import Epoch, Loop
from vitmnist.diagnosis.observation import Source
from vitmnist.diagnosis.trial import Trial
from vitmnist.runtime.cpu import Cores
from vitmnist.runtime.memory import mib

GAIN = 0.2  # the part of the time of a script's epochs that a change must save, as estimates err
ERROR, SHARED_ERROR = 0.15, 1.0  # of a set-up; and where other programs may take more of the cores then
ORDER = "what is shuffled or random by the global generators then comes in another order"


@dataclass(frozen=True)
class Change:
    """Something to change.

    Args:
        text: has a place `{epochs}` for those from which the change pays.
        once_s: what it costs at the start, at least and at most.
        part: the time of an epoch then, as a part of that now.
    """

    text: str
    once_s: tuple[float, float]
    part: float

    def advice(self, epoch_s: float, epochs: float, *, is_shared: bool = False) -> str | None:
        """The text, if the change saves time in a script with so many epochs of this duration.

        Args:
            is_shared: whether other programs use the cores.
        """
        gained_s, error = max(epoch_s * (1 - self.part), 1e-9), SHARED_ERROR if is_shared else ERROR
        least, most = self.once_s
        first, last = (max(1, ceil(once_s / gained_s)) for once_s in (least * (1 - error), most * (1 + error)))
        then_s = most / epochs + epoch_s * self.part
        if self.part > 1 - GAIN or last > epochs or then_s > (1 - GAIN) * epoch_s:
            return None
        return self.text.format(epochs=f"epoch {first}" if first == last else f"epoch {first} to {last}")


def loop_of(figures: dict[str, Any], script: dict[str, Any], cores: Cores) -> Loop:
    """The loop of the script over a loader."""
    computed_s = (cores.busy - (cores.workers or 0.0)) * script["seconds"]
    computed_s -= sum(one["waiting_cpu_s"] for one in script["loaders"])
    worked_s = max(script["seconds"] - script["waiting_s"], 1e-9)
    batches = figures["batches_seen"] / max(figures["epochs"], 1)
    if figures["epochs"] < 2 and figures["samples"] and figures["batch_size"]:  # it may have been stopped
        batches = max(batches, figures["samples"] / figures["batch_size"])
    return Loop(batches, figures["batch_size"] or 1, script["work_s"], computed_s / worked_s)


def are_rebuilt(figures: dict[str, Any]) -> bool:
    """Whether the script makes a new loader for each epoch."""
    return bool(figures["num_loaders"] > 1 and figures["are_rebuilt"])


def keep_workers(figures: dict[str, Any]) -> bool:
    """Whether workers stay from one epoch to the next."""
    return bool(figures["persistent_workers"] and not are_rebuilt(figures))


def epoch_now(figures: dict[str, Any], loop: Loop) -> Epoch:
    """An epoch of the script, as it was measured."""
    passes, stay = figures["passes"], keep_workers(figures)
    start_s = figures["restarts_s"] / passes if passes else 0.0 if stay else figures["start_s"]
    batches = max(figures["batches"] - passes, 1)
    batch_s = max(figures["waiting_s"] - figures["restarts_s"], 0.0) / batches + loop.work_s
    return Epoch(start_s, loop.batches * batch_s)


def find_changes(
    figures: dict[str, Any], loop: Loop, source: Source, trial: Trial, most_workers: int, import_s: float
) -> Iterator[Change]:
    """Changes that may make an epoch shorter, with their costs.

    Args:
        trial: of `from_dataloader`.
        most_workers: the number that may help.
        import_s: to import `from_dataloader`.
    """
    now, workers, forks = epoch_now(figures, loop), figures["num_workers"], figures["start_method"] == "fork"
    stay = keep_workers(figures)
    samples = source.dataset, source.collate
    timed = None if figures["is_iterable"] or (workers and not forks) else loop.epoch(*samples, workers)
    before = replace(timed, start_s=0.0 if stay else timed.start_s) if timed else now
    replaced = trial.replaced if trial.set_up_s[1] < inf else None
    if replaced and (then := loop.epoch(replaced.dataset, replaced.collate_fn, replaced.num_workers)):
        # The script may have run faster or slower than what is timed after its end.
        paces = (1.0, now.seconds / before.seconds)
        set_up_s = [pace * (one_s + import_s) for pace in paces for one_s in trial.set_up_s]
        text = (
            f"use vitmnist.from_dataloader(loader), which {trial.method} and gives the same batches: "
            f"{max(trial.set_up_s) + import_s:.2g} s at the start and {mib(trial.memory_bytes)} of memory, which pay "
        )
        part = (then.rest_s if stay else then.seconds) / before.seconds
        yield Change(text + "from {epochs} on", (min(set_up_s), max(set_up_s)), part)
    # Forked processes lack the threads of a pool, and would wait for them.
    has_threads = any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread())
    if timed and forks and not (has_threads and not workers):
        for number in {most_workers} - {*range(workers + 1)} | {0} - {workers}:
            if then := loop.epoch(*samples, number):
                yield _with_workers(number, then, before)
    if workers and not stay:
        # Waiting for a first batch remains.
        fill_s = loop.batch_size * sum(trial.parts.values())
        once = "build the DataLoader once, before the epochs, with " if are_rebuilt(figures) else "try "
        text = f"{once}persistent_workers=True, which keeps the workers from one epoch to the next ({ORDER})"
        start_s = max(0.0, now.start_s - fill_s)
        yield Change(text, (start_s, start_s), 1 - start_s / now.seconds)


def _with_workers(number: int, then: Epoch, timed: Epoch) -> Change:
    """Another number of workers, which stay if starting them in each epoch takes too long."""
    if then.seconds <= (1 - GAIN) * timed.seconds:
        return Change(f"try num_workers={number}", (0.0, 0.0), then.seconds / timed.seconds)
    text = f"try num_workers={number} with persistent_workers=True, as starting them takes {then.start_s:.2g} s"
    return Change(text, (then.start_s, then.start_s), then.rest_s / timed.seconds)
