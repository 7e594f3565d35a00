"""What to change in a user's loader, derived from its measurements."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from math import ceil, inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vitmnist.diagnosis.verdict import COMPUTE_BOUND_PCT, milliseconds, plural
from vitmnist.runtime.cpu import Cores

if TYPE_CHECKING:
    from vitmnist.diagnosis.observation import Source

COMPUTES = 0.2  # share of processor time in reading samples from which they count as computing, not waiting
MOST_WORKERS = 4  # for each core, where samples wait
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
    figures: dict[str, Any], script: dict[str, Any], cores: Cores, source: Source | None
) -> list[Advice]:
    """What to change in a loader, if the script waits noticeably, and at least half as long for it as for any other.

    Args:
        figures: of the loader, as in the report; where the time of a sample goes is added to it.
        script: the report, for its command and times.
        source: what makes the batches; None if the dataset does.
    """
    longest_pct = max(one["waiting_pct"] for one in script["loaders"])
    if script["waiting_pct"] < COMPUTE_BOUND_PCT or figures["waiting_pct"] < longest_pct / 2:
        return []
    import_s = _import_s()
    from vitmnist.diagnosis import changes
    from vitmnist.diagnosis.trial import Trial, try_samples

    loop, trial, texts = changes.loop_of(figures, script, cores), Trial(refused="it gives batches itself"), []
    reason, most_workers = why_late(figures, script, cores)
    if source:
        epochs, now_s = inf if script["stopped"] else figures["epochs"], changes.epoch_now(figures, loop).seconds
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the samples may print
            trial = try_samples(source, figures, loop)
            found = changes.find_changes(figures, loop, source, trial, most_workers, import_s)
            texts = [text for one in found if (text := one.advice(now_s, epochs, is_shared=cores.are_shared))]
    # Where other programs take the cores, noise exceeds the differences between the parts of a sample.
    figures["parts"] = trial.parts if figures["waiting_pct"] == longest_pct and not cores.are_shared else {}
    text = "; ".join([reason, *([", or ".join(texts)] if texts else [])])
    if trial.refused:
        text += f"; vitmnist.from_dataloader refuses this loader: {trial.refused}"
    if trial.unread:
        text += f"; from_dataloader was not tried: no sample can be read after the end of the script ({trial.unread})"
    again = "the same command, after a change of the script"
    if not script["rank"]:  # the command of torchrun is not known
        again += f":\n{script['command']}"
    return [{"text": text, "run_next": again if texts or OTHERS in reason else COMPARE}]


@cache
def _import_s() -> float:
    """Seconds to import what tries a loader: about those of importing `from_dataloader`."""
    began = perf_counter()
    import_module("vitmnist.diagnosis.changes")  # imports torch, as the script has done
    return perf_counter() - began


def why_late(figures: dict[str, Any], script: dict[str, Any], cores: Cores) -> tuple[str, int]:
    """Why batches come late, and how many workers may make them faster."""
    workers, batch_s = figures["num_workers"], figures["waiting_s"] / max(figures["batches"], 1)
    if workers and figures["epochs"] > 1 and figures["restarts_pct"] > figures["waiting_pct"] / 2:
        return f"the starts and ends of epochs take {figures['restarts_pct']:.0f}% of the time", 0
    if workers:
        # While the main thread waits for a worker, one of them makes the batch: computing takes at least this time.
        # A worker cannot be assigned to its loader, so both times are summed over all loaders.
        computing_s, waiting_s = (cores.workers or 0.0) * script["seconds"], script["waiting_s"]
        batch_s = workers * (batch_s + script["work_s"])  # all of them work if the script waits
        reason = f"the {plural(workers, 'worker')} cannot keep up with the step of {milliseconds(script['work_s'])}"
    else:
        computing_s, waiting_s = figures["waiting_cpu_s"], figures["waiting_s"]
        reason = f"the main process makes each batch between two steps, which takes {milliseconds(batch_s)}"
    enough = ceil(batch_s / max(script["work_s"], 1e-6))  # to make a batch per step
    # Without a free core, samples that compute use as little processor time as samples that wait.
    if computing_s < COMPUTES * waiting_s and not cores.are_shared:
        return f"{reason}; its samples wait rather than compute ({cores})", min(enough, MOST_WORKERS * cores.available)
    if cores.are_busy:
        others = OTHERS if cores.are_shared and not script["rank"] else ""
        return f"{reason}, and hardly a core is free ({cores}){others}", 0
    return f"{reason}; cores are free ({cores})", min(enough, cores.available)
