"""What to change in a user's loader, derived from its measurements."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

from vitmnist.diagnosis.verdict import COMPUTE_BOUND_PCT, milliseconds, plural
from vitmnist.runtime.cpu import NOTICEABLE, Cores

WORTH_A_WORKER_S = 0.001  # per batch; below it, handing a batch over from a worker takes longer than making it
COMPUTES = 0.2  # share of processor time in reading samples from which they count as computing, not waiting
MOST_WORKERS = 4  # for each core, where samples wait
IDLE_WORKERS = 0.5  # of the cores that they could use; below it, workers are not what limits
WORTH_DECODING = 0.15  # the share of the time of a sample with random transforms that decoding once must save
ASKED = 16  # samples that `from_dataloader` is tried with
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
        figures: of the loader, as in the report.
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
    gain, refused = _ask(*samples, figures["batch_size"]) if samples else (None, "it gives batches itself")
    if gain == "" or (gain and not mostly_restarts):  # with random transforms, the replacement has workers too
        # Listed first: starting workers in every short epoch can cost more than they save.
        changes = [
            f"use vitmnist.from_dataloader(loader), which decodes once and gives the same batches{gain}",
            *changes,
        ]
    if gain != "" and restarts_pct >= 100 * NOTICEABLE:  # the loader still has workers
        changes += _keep_workers(figures)
    text = "; ".join([reason, *([", or ".join(changes)] if changes else [])])
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
    if computing_s < COMPUTES * waiting_s:
        reason += f"; its samples wait rather than compute ({cores})"
        more = min(enough, MOST_WORKERS * max(cores.available, 2))
        return reason, [f"try num_workers={more}"] if more > workers else []
    if workers and cores.workers is not None and cores.workers < IDLE_WORKERS * min(workers, cores.available):
        reason = (
            f"a batch arrives {milliseconds(waited_s)} late although the {plural(workers, 'worker')} use only "
            f"{cores.workers:.1f} cores: handing it over takes this time, or files that they wait for"
        )
        return reason, [f"compare num_workers=0 and num_workers={2 * workers}"]
    if cores.are_busy:
        others = OTHERS if cores.are_shared and not script["rank"] else ""
        return f"{reason}, and hardly a core is free ({cores}){others}", []
    more = min(enough, cores.available)
    return reason, [f"try num_workers={more}, since cores are free ({cores})"] if more > workers else []


def _keep_workers(figures: dict[str, Any]) -> list[str]:
    """How to keep workers from one epoch to the next, unless they are kept already."""
    if figures["persistent_workers"] and figures["num_loaders"] == 1:
        return []
    once = "build the DataLoader once, before the epochs, with " if figures["num_loaders"] > 1 else "try "
    order = "what is shuffled or random by the global generators then comes in another order"
    return [f"{once}persistent_workers=True, which keeps the workers from one epoch to the next ({order})"]


def _ask(dataset: Any, collate: Any, kind: type, batch_size: int | None) -> tuple[str | None, str | None]:
    """What to add to the advice of `from_dataloader`, and why that refuses a loader; tries it with a few samples.

    With random transforms the former says what decoding once saves; it is None if that is too little.
    """
    from torch.utils.data import DataLoader  # not before the script has imported it

    from vitmnist.diagnosis.alternatives import decode_part
    from vitmnist.loaders.timing import reason
    from vitmnist.replacement.decoded_dataset import DecodedDataset, TransformedDataset
    from vitmnist.replacement.original import check_iteration, check_replaceable
    from vitmnist.runtime.memory import DoesNotFitError

    if isinstance(dataset, DecodedDataset):
        return None, None
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the samples may print
            check_iteration(kind)
            loader = DataLoader(dataset, batch_size or ASKED, collate_fn=collate)
            check_replaceable(loader)
            indices = range(0, len(dataset), max(len(dataset) // ASKED, 1))[:ASKED]
            decoded: Any = decode_part(loader, indices)[0].dataset
            if not isinstance(decoded, TransformedDataset):
                return "", None
            before_s, after_s = (_seconds(one, len(indices)) for one in (decoded.original, decoded))  # equal draws
    except DoesNotFitError:  # in memory; a file may have room
        return "", None
    except Exception as error:  # samples and collate function may fail in any way
        return None, reason(error, "dataloader").removeprefix("ram: ")  # where `decode_part` keeps samples
    if after_s > (1 - WORTH_DECODING) * before_s:
        return None, None
    ratio = after_s / before_s
    return (
        f" (the random transforms are applied each time, so that a sample takes {ratio:.2f} times as long; decoding "
        f"all of them at the start pays from epoch {int(1 / (1 - ratio)) + 1} on)"
    ), None


def _seconds(dataset: Any, size: int) -> float:
    """Seconds to read a sample, the median of a few; each with random numbers of its own, which are always the same."""
    from vitmnist.data.seeding import seed_generators

    times = []
    for index in range(size):
        seed_generators(0, 0, index)
        started = perf_counter()
        dataset[index]
        times.append(perf_counter() - started)
    return median(times)
