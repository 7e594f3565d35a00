"""A stand-in for the training step of a script that has ended."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import ceil

NEGLIGIBLE_CORES = 0.1
"""A smaller fraction of a core gets no thread of its own."""


class ImitatedStep:
    """Takes as long as a step of a script, and as much processor time, on as many threads.

    The work is a fixed number of hashes, calibrated while no workers run. So it takes longer where workers use the
    cores, as the step of the script does. For the rest of the time it sleeps.

    Args:
        step_s: seconds of a step.
        cores: how many cores a step uses, on average.
    """

    def __init__(self, step_s: float, cores: float) -> None:
        self.threads = max(1, ceil(cores - NEGLIGIBLE_CORES))
        busy_share = min(cores / self.threads, 1.0)
        self._pool = ThreadPoolExecutor(self.threads)
        self._block = bytes(2**15)
        self._hashes = 1000
        start = time.thread_time()
        self._compute()
        self._hashes = round(busy_share * step_s * self._hashes / (time.thread_time() - start))
        self._sleep_s = (1 - busy_share) * step_s

    def __call__(self, batch: object) -> None:
        futures = [self._pool.submit(self._compute) for _ in range(self.threads - 1)]
        self._compute()
        for future in futures:
            future.result()
        time.sleep(self._sleep_s)

    def _compute(self) -> None:
        for _ in range(self._hashes):
            sha256(self._block)  # Hashing releases the interpreter's lock.
