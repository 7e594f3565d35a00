"""Work in background threads: an ordered `map` with a bounded lead, and slices of a batch."""

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from vitmnist.runtime.cpu import limit_to_one_core

Item = TypeVar("Item")
Returned = TypeVar("Returned")
ResultOrError = tuple[Any, BaseException | None]


class BackgroundMap(Iterator[Returned], Generic[Item, Returned]):
    """Like `map`, but runs `fn` in background threads up to `max_ahead` items early and keeps the order.

    An exception is raised in place of its result, with its own type; the next results can still be taken.

    The threads stop within a second after `close` is called, the items run out, the map is garbage-collected, or the
    interpreter exits. A thread in a blocking call lives until the process exits.

    Args:
        fn: called in the threads.
        items: taken in the consumer's thread when it requests a result.
        max_ahead: the largest number of items that are computed ahead of the consumer.
        context: a context that each thread enters for its lifetime.
    """

    def __init__(
        self,
        fn: Callable[[Item], Returned],
        items: Iterable[Item],
        threads: int,
        max_ahead: int,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._items, self._max_ahead = iter(items), max_ahead
        # Garbage collection can run `_stop_workers` in any thread, also in the middle of a queue operation, and the
        # `put` of `SimpleQueue` is reentrant. With a `Future` for each result, an epoch of `prefetch` took 7% longer.
        self._jobs: SimpleQueue[tuple[Item, SimpleQueue[ResultOrError]] | None] = SimpleQueue()
        self._waiting: deque[SimpleQueue[ResultOrError]] = deque()
        self._is_stopped = threading.Event()
        work = partial(_run_jobs, fn, self._jobs, self._is_stopped, context)
        # At exit, the interpreter would join non-daemon threads before it calls `_stop_workers`.
        workers = [threading.Thread(target=work, name="vitmnist-map", daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        self.close = weakref.finalize(self, _stop_workers, self._jobs, self._is_stopped, workers)
        """Stop the threads, and wait up to a second for them."""

    def __next__(self) -> Returned:
        while len(self._waiting) <= self._max_ahead:
            try:
                item = next(self._items)
            except StopIteration:
                break
            self._waiting.append(SimpleQueue())
            self._jobs.put((item, self._waiting[-1]))
        if not self._waiting or self._is_stopped.is_set():
            self.close()
            raise StopIteration
        result, error = self._waiting[0].get()
        self._waiting.popleft()
        try:
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
        finally:
            # The traceback refers to this frame, and that cycle would keep every object in its frames alive.
            del error


def _run_jobs(
    fn: Callable[[Item], Any],
    jobs: SimpleQueue[tuple[Item, SimpleQueue[ResultOrError]] | None],
    is_stopped: threading.Event,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    with context():
        while (job := jobs.get()) and not is_stopped.is_set():
            item, queue = job
            try:
                queue.put((fn(item), None))
            except StopIteration:  # Raised by `__next__`, it would silently end the consumer's loop (PEP 479).
                queue.put((None, RuntimeError("a function in a background thread raised StopIteration")))
            except BaseException as error:  # Without a result, the consumer would wait for ever.
                queue.put((None, error))
            del job, item  # A thread that waits must not keep a batch.


def _stop_workers(jobs: SimpleQueue[Any], is_stopped: threading.Event, workers: list[threading.Thread]) -> None:
    is_stopped.set()
    for _ in workers:
        jobs.put(None)
    deadline = time.monotonic() + 1.0  # Python cannot interrupt a thread that blocks.
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join(max(0.0, deadline - time.monotonic()))


def map_slices(
    function: Callable[[slice], object], rows: int, size: int | None = None, threads: int | None = None
) -> None:
    """Divide `range(rows)` into slices, and call a function with each slice in threads that use one core each.

    Unlike torch's own threads, they do not wait for each other after every operation. On busy cores, such a wait takes
    longer than the operation.

    Args:
        size: rows of a slice; a thread takes the next slice when it is free. By default each thread has one slice.
        threads: by default as many as torch uses.
    """
    threads, is_inference = threads or torch.get_num_threads(), torch.is_inference_mode_enabled()
    size = size or max(1, math.ceil(rows / threads))
    slices = iter([slice(start, start + size) for start in range(0, rows, size)])

    def work() -> None:
        with torch.inference_mode(is_inference):  # Each thread has its own mode.
            for part in slices:
                function(part)

    futures = [_create_slice_threads(os.getpid()).submit(work) for _ in range(threads)]
    wait(futures)  # When a thread raises, no other thread may still write to the batch.
    for future in futures:
        future.result()


@cache
def _create_slice_threads(process: int) -> ThreadPoolExecutor:
    """Create the threads of `map_slices` once per process: limiting a thread to one core takes a millisecond."""
    return ThreadPoolExecutor(os.cpu_count(), "vitmnist-slices", limit_to_one_core)
