"""`progress.json`: where a run is, rewritten while it runs, also during set-up and long decodes."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path

from vitmnist.runtime.files import write_atomic

FILE = "progress.json"
INTERVAL_S = 5.0


class Heartbeat:
    """Writes the progress of a run every `INTERVAL_S` from a thread; a context manager.

    The run only sets attributes, which costs nothing within an epoch.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        self.status = "setting up"
        self.epoch = 0  # completed
        self.batch = 0  # done in the pass under way
        self.batches = 0  # in that pass
        self.epochs, self._path = epochs, folder / FILE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def begin_pass(self, status: str, epoch: int, batch: int, batches: int) -> None:
        """Start counting the batches of a pass over a split."""
        self.status, self.epoch, self.batch, self.batches = status, epoch, batch, batches

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # as on a file system that has become read-only; the run's own error counts
            self._path.unlink()  # result.json says how the run ended

    def _run(self) -> None:
        process = {"pid": os.getpid(), "host": platform.node()}
        while True:
            progress = {name: getattr(self, name) for name in ("status", "epoch", "epochs", "batch", "batches")}
            with suppress(OSError):  # a full disk ends the run elsewhere, where it has something to lose
                write_atomic(self._path, json.dumps({**progress, "updated_at": time.time(), **process}).encode())
            if self._stopped.wait(INTERVAL_S):
                return
