"""Times the loader of a script and others after the script has ended, with an imitation of its step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from io import StringIO
from math import ceil, inf

from vitmnist.diagnosis.candidates import AS_IT_IS, add_alternatives, limit_waiting
from vitmnist.diagnosis.loops import Loop
from vitmnist.replacement.from_dataloader import rebuilt
from vitmnist.timing.benchmark import Benchmark, Candidate, rows_of
from vitmnist.timing.table import Row

BATCHES, SECONDS = 50, 6.0  # Batches of each candidate that are timed, and about how many seconds this takes for all
NEGLIGIBLE_CORES = 0.1  # A smaller part of a core gets no thread of its own
GAIN = 0.2  # The share of the time that a change must save to be named


class ImitatedStep:
    """Takes as long as a step of a script, and as much processor time, on as many threads.

    The work is a fixed number of hashes, calibrated while no workers run. So it takes longer where workers use the
    cores, as the step of the script does. For the rest of the time it sleeps.
    """

    def __init__(self, step_s: float, cores: float) -> None:
        self.threads = max(1, ceil(cores - NEGLIGIBLE_CORES))
        busy_share = min(cores / self.threads, 1.0)
        self._pool = ThreadPoolExecutor(self.threads)
        self._block = bytes(2**15)
        self._hashes = 1000
        began = time.thread_time()
        self._compute()
        self._hashes = round(busy_share * step_s * self._hashes / (time.thread_time() - began))
        self._rest_s = (1 - busy_share) * step_s

    def __call__(self, batch: object) -> None:
        others = [self._pool.submit(self._compute) for _ in range(self.threads - 1)]
        self._compute()
        for other in others:
            other.result()
        time.sleep(self._rest_s)

    def _compute(self) -> None:
        for _ in range(self._hashes):
            sha256(self._block)  # Releases the interpreter's lock


def try_loaders(loop: Loop) -> tuple[list[Row], dict[str, float]]:
    """The table of a loop of a script, with an imitated step, and where the time of a sample goes."""
    loader = loop.copy
    if loader is None:
        return [Row(AS_IT_IS, error="this loader cannot be built again")], {}
    length: float = loop.batches / len(loop.passes)
    with suppress(TypeError):
        length = len(loader)
    step = ImitatedStep(loop.step_s, loop.cores)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))  # The samples may print.
        stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # For example, torch warns of more workers than cores.
        benchmark = Benchmark(stack)
        now = benchmark.add(AS_IT_IS, lambda: Candidate(limit_waiting(rebuilt(loader)), step=step))
        parts = add_alternatives(benchmark, loader, now)
        benchmark.run(BATCHES, SECONDS)
        return rows_of(benchmark.candidates, length), parts


def best_change(rows: Sequence[Row], epochs: float = inf) -> str | None:
    """The change that saves most of the time of so many epochs, if it saves the share `GAIN` of it."""

    def seconds(row: Row) -> float:
        return row.epoch_s.median + (row.set_up_s or 0.0) / epochs if row.epoch_s else inf

    best = min((row for row in rows if row.change), key=seconds, default=None)
    return best.change if best and seconds(best) <= (1 - GAIN) * seconds(rows[0]) < inf else None
