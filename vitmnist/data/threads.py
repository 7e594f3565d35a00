"""Work on several threads: a `map` that is only a few items ahead, and the parts of a batch."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from queue import SimpleQueue
from typing import TypeVar

import torch

from vitmnist.runtime.cpu import limit_to_one_core, stop_idle_spinning

PART = 2**20  # values of a batch that a thread works on at a time: its temporaries stay in the cache

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int | None = None
) -> Generator[Result, None, None]:
    """The results of `function` in the order of the items, in threads that use a core each.

    An exception is raised in place of its result. Closing the iterator waits for the items that are being computed.

    Args:
        items: taken in the consumer's thread.
        ahead: how many items are computed ahead of the consumer, at most; `2 * threads` by default.
    """
    jobs: SimpleQueue[tuple[Future[Result], Item] | None] = SimpleQueue()
    waiting: deque[Future[Result]] = deque()
    # Daemons: at its end the interpreter waits for all that an executor has queued, and only then closes this iterator.
    workers = [threading.Thread(target=_work, args=(function, jobs, not n), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for item in items:
            waiting.append(Future())
            jobs.put((waiting[-1], item))
            if len(waiting) > (2 * threads if ahead is None else ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join()


def _work(
    function: Callable[[Item], Result], jobs: SimpleQueue[tuple[Future[Result], Item] | None], is_first: bool
) -> None:
    if is_first:
        stop_idle_spinning()
    limit_to_one_core()
    while job := jobs.get():
        future, item = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(item))
            except BaseException as error:  # SystemExit too: the consumer would wait for ever
                future.set_exception(error)


def in_parts(
    function: Callable[[slice], object], rows: int, size: int | None = None, threads: int | None = None
) -> None:
    """Call a function with spans of the rows of a batch, in threads that use a core each.

    Unlike torch's own threads they do not wait for each other after every operation, which on busy cores takes longer
    than the operation.

    Args:
        size: rows of a span; a thread takes the next one when it is free. By default each thread has one span.
        threads: by default as many as torch uses.
    """
    threads, is_inference = threads or torch.get_num_threads(), torch.is_inference_mode_enabled()
    size = size or math.ceil(rows / threads)
    spans = iter([slice(first, first + size) for first in range(0, rows, size)])

    def work() -> None:
        with torch.inference_mode(is_inference):  # each thread has a mode of its own
            for span in spans:
                function(span)

    futures = [_pool(os.getpid()).submit(work) for _ in range(threads)]
    wait(futures)  # also for those that still write to the batch when another has raised an error
    for future in futures:
        future.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; they are kept, because limiting one to a core takes a millisecond."""
    return ThreadPoolExecutor(os.cpu_count(), "vitmnist-parts", limit_to_one_core)
