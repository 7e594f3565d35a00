"""What to change in a user's loader, derived from its measurements."""

from __future__ import annotations

from math import ceil, inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vitmnist.diagnosis.verdict import COMPUTE_BOUND_PCT, milliseconds, plural
from vitmnist.runtime.cpu import NOTICEABLE, Cores

if TYPE_CHECKING:
    from vitmnist.diagnosis.trial import Trial

WORTH_A_WORKER_S = 0.001  # per batch; below it, handing a batch over from a worker takes longer than making it
COMPUTES = 0.2  # share of processor time in reading samples from which they count as computing, not waiting
MOST_WORKERS = 4  # for each core, where samples wait
IDLE_WORKERS = 0.5  # of the cores that they could use; below it, workers are not what limits
GAIN = 0.1  # the part of the time of an epoch that a change must save
OTHERS = "; stop the other programs and measure again"
COMPARE = "import vitmnist\nvitmnist.diagnose(loader, step)  # step: your function that trains on one batch"
PROFILE = (
    "with torch.profiler.profile() as profile: ...  # a few of your training steps\n"
    'print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))'
)
Advice = dict[str, str]
"""`text`: what to change, with its measured reason; `run_next`: what shows more, or whether the change helped."""


def advise_on_script(waiting_pct: float, cores: Cores) -> list[Advice]:
    """Where to look if the script hardly waits."""
    if waiting_pct >= COMPUTE_BOUND_PCT:
        return []
    if cores.compete:
        text = f"hardly a core is free ({cores}), and workers use {cores.workers:.1f}: measure the step without loading"
        return [{"text": text, "run_next": COMPARE}]
    text = f"the loader is not the problem: {100 - waiting_pct:.0f}% of the time is in the step; profile the step"
    return [{"text": text, "run_next": PROFILE}]


def advise_on_loader(
    figures: dict[str, Any], script: dict[str, Any], cores: Cores, samples: tuple[Any, Any, type] | None
) -> list[Advice]:
    """What to change in a loader, if the script waits noticeably, and at least half as long for it as for any other.

    Args:
        figures: of the loader, as in the report; where the time of a sample goes is added to it.
        script: the report, for its command and times.
        samples: dataset, collate function and class of the loader; None if the dataset gives batches.
    """
    longest_pct = max(one["waiting_pct"] for one in script["loaders"])
    if script["waiting_pct"] < COMPUTE_BOUND_PCT or figures["waiting_pct"] < longest_pct / 2:
        return []
    again = "the same command, after a change of the script"
    if not script["rank"]:  # the command of torchrun is not known
        again += f":\n{script['command']}"
    restarts_pct = figures["restarts_pct"] if figures["num_workers"] and figures["epochs"] > 1 else 0.0
    mostly_restarts = restarts_pct > figures["waiting_pct"] / 2
    if mostly_restarts:
        reason = f"the starts and ends of epochs take {restarts_pct:.0f}% of the time"
        changes: list[str] = []
    else:
        reason, changes = _workers(figures, script, cores)
    began = perf_counter()
    from vitmnist.diagnosis.trial import try_samples  # which imports torch, as the script has done

    imported_s = perf_counter() - began  # as in the script with `from_dataloader`
    trial = try_samples(*samples, figures) if samples else None
    if trial:
        trial.set_up_s += imported_s
    figures["parts"] = trial.parts if trial and figures["waiting_pct"] == longest_pct else {}
    decoding = _decode_once(trial, figures, script) if trial and not trial.refused else None
    if trial and decoding and not (trial.is_random and mostly_restarts):  # the replacement has workers then, too
        # Listed first: starting workers in every short epoch can cost more than they save.
        changes = [decoding, *changes]
    if (not decoding or (trial and trial.is_random)) and restarts_pct >= 100 * NOTICEABLE:  # it still has workers
        changes += _keep_workers(figures)
    text = "; ".join([reason, *([", or ".join(changes)] if changes else [])])
    refused = "it gives batches itself" if not samples else trial.refused if trial else None
    if refused:
        text += f"; vitmnist.from_dataloader refuses this loader: {refused}"
    return [{"text": text, "run_next": again if changes or OTHERS in reason else COMPARE}]


def _workers(figures: dict[str, Any], script: dict[str, Any], cores: Cores) -> tuple[str, list[str]]:
    """Why batches come late, and the number of workers that could make them faster, if there is one."""
    workers, batch_s = figures["num_workers"], figures["waiting_s"] / max(figures["batches"], 1)
    if workers:
        # While the main thread waits for a worker, one of them makes the batch: computing takes at least this time.
        # Which loader a worker belongs to is not known, so both times are those of all loaders.
        computing_s, waiting_s = (cores.workers or 0.0) * script["seconds"], script["waiting_s"]
        waited_s = batch_s
        batch_s = workers * (batch_s + script["work_s"])  # all of them work if the script waits
        reason = f"the {plural(workers, 'worker')} cannot keep up with the step of {milliseconds(script['work_s'])}"
    else:
        computing_s, waiting_s = figures["waiting_cpu_s"], figures["waiting_s"]
        reason = f"the main process makes each batch between two steps, which takes {milliseconds(batch_s)}"
    if batch_s < WORTH_A_WORKER_S:
        reason += ", less than a worker needs to hand it over"
        return reason, ["try num_workers=0"] if workers else []
    enough = ceil(batch_s / max(script["work_s"], 1e-6))  # to make a batch per step
    # What computes uses as little processor time as what waits if it gets no core.
    if computing_s < COMPUTES * waiting_s and not cores.are_shared:
        reason += f"; its samples wait rather than compute ({cores})"
        more = min(enough, MOST_WORKERS * max(cores.available, 2))
        return reason, _more_workers(more, batch_s / more, batch_s, figures, script)
    if workers and (cores.workers or 0.0) < IDLE_WORKERS * min(workers, cores.available) and not cores.are_shared:
        reason = (
            f"a batch arrives {milliseconds(waited_s)} late although the {plural(workers, 'worker')} use only "
            f"{cores.workers:.1f} cores: handing it over takes this time, or files that they wait for"
        )
        return reason, [f"compare num_workers=0 and num_workers={2 * workers}"]
    if cores.are_busy:
        others = OTHERS if cores.are_shared and not script["rank"] else ""
        return f"{reason}, and hardly a core is free ({cores}){others}", []
    more = min(enough, cores.available)
    each_s = max(batch_s / more, (batch_s + script["work_s"]) / cores.available)  # the step needs a core, too
    changes = _more_workers(more, each_s, batch_s, figures, script)
    return reason, [f"{one}, since cores are free ({cores})" for one in changes]


def _more_workers(
    workers: int, each_s: float, batch_s: float, figures: dict[str, Any], script: dict[str, Any]
) -> list[str]:
    """The advice to use this number of workers, if they save more time than their start in each epoch takes.

    Args:
        each_s: seconds per batch that all of them together need.
        batch_s: seconds that one of them needs.
    """
    from vitmnist.diagnosis.trial import worker_start_s

    before = figures["num_workers"]
    if workers <= before:
        return []
    epochs = inf if script["stopped"] else figures["epochs"]
    batches = _batches_per_epoch(figures)
    if before:
        start_s = figures["restarts_s"] / max(figures["passes"], 1) * workers / before
    else:
        start_s = worker_start_s(workers, figures["start_method"])
    now_s = batches * (figures["waiting_s"] / figures["batches"] + script["work_s"])
    then_s = batch_s + batches * (max(each_s, script["work_s"]) + WORTH_A_WORKER_S)
    if then_s + start_s < (1 - GAIN) * now_s:
        changed = f"try num_workers={workers}"
    elif then_s + start_s / epochs < (1 - GAIN) * now_s:
        changed = f"try num_workers={workers} with persistent_workers=True, as starting them takes {start_s:.2g} s"
    else:
        return []
    return [changed + (", if each worker reads its own part of the samples" if figures["is_iterable"] else "")]


def _batches_per_epoch(figures: dict[str, Any]) -> float:
    """How many batches the script takes in an epoch; if it was stopped in the first, all that there are."""
    if figures["epochs"] < 2 and figures["samples"] and figures["batch_size"]:
        return float(max(figures["batches_seen"], figures["samples"] / figures["batch_size"]))
    return float(figures["batches_seen"] / max(figures["epochs"], 1))


def _decode_once(trial: Trial, figures: dict[str, Any], script: dict[str, Any]) -> str | None:
    """The advice to use `from_dataloader`, if the epochs of the script save more time than decoding takes."""
    from vitmnist.runtime.memory import mib

    now_s = figures["waiting_s"] / figures["batches"] + script["work_s"]
    workers = figures["num_workers"] if trial.is_random or figures["persistent_workers"] else 0  # it keeps them then
    then_s = trial.batch_s + script["work_s"]
    if workers:
        then_s = max(trial.batch_s / workers, script["work_s"]) + WORTH_A_WORKER_S
    saved_s = _batches_per_epoch(figures) * (now_s - then_s)
    if then_s > (1 - GAIN) * now_s:
        return None
    epoch = max(1, ceil(trial.set_up_s / saved_s))
    if epoch > figures["epochs"] and not script["stopped"]:
        return None
    how = "decodes what is not random once" if trial.is_random else "decodes once"
    return (
        f"use vitmnist.from_dataloader(loader), which {how} and gives the same batches: {trial.set_up_s:.2g} s at the "
        f"start and {mib(trial.memory_bytes)} of memory, which pay from epoch {epoch} on"
    )


def _keep_workers(figures: dict[str, Any]) -> list[str]:
    """How to keep workers from one epoch to the next, unless they are kept already."""
    if figures["persistent_workers"] and figures["num_loaders"] == 1:
        return []
    once = "build the DataLoader once, before the epochs, with " if figures["num_loaders"] > 1 else "try "
    order = "what is shuffled or random by the global generators then comes in another order"
    return [f"{once}persistent_workers=True, which keeps the workers from one epoch to the next ({order})"]
