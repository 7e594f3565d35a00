"""A loader with one of several faults, for an audit."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from vitmnist.data.randomness import read_samples
from vitmnist.data.sources import collate_samples

SAMPLES = 64
BATCH_SIZE = 5
ENDED = threading.Event()


class CustomLoader:
    """Epoch e of 64 samples in batches of 5 is e, e + 1, …, 63, 0, …; `fault` breaks a promise."""

    def __init__(self, dataset: Dataset, num_workers: int = 0, seed: int = 0, fault: str = "") -> None:
        self.dataset, self.workers, self.seed, self.fault = dataset, num_workers, seed, fault
        if fault == "leaves a thread":
            threading.Thread(target=ENDED.wait, name="reader", daemon=True).start()
        if fault == "leaves a process":
            fork = multiprocessing.get_context("fork")
            fork.Process(target=time.sleep, args=(60,), name="reader", daemon=True).start()

    def indices(self, number: int) -> list[int]:
        shift = {"same order": 0, "order depends on workers": number + self.workers}.get(self.fault, number)
        indices = [(index + shift) % SAMPLES for index in range(SAMPLES)]
        if self.fault == "leaves out index 7":
            indices.remove(7)
        if self.fault == "repeats index 7":
            indices.insert(indices.index(7) + BATCH_SIZE, 7)
        return indices

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        indices = self.indices(number)
        batches = [indices[first : first + BATCH_SIZE] for first in range(0, len(indices), BATCH_SIZE)]
        if self.fault == "drops the last batch":
            batches.pop()
        start += {"resume skips": 1, "resume repeats": -1}.get(self.fault, 0) if start else 0
        for batch in batches[start:]:
            seed = self.seed + (self.workers if self.fault == "noise depends on workers" else 0)
            samples = read_samples(self.dataset, batch, seed, 0 if self.fault == "same noise" else number)
            if self.fault == "shared noise":
                for index, noise in samples:
                    noise[1] = index % 32
            yield collate_samples(samples)
