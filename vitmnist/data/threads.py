"""Work on several threads: a `map` that is only a few items ahead, and the parts of a batch."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

from vitmnist.runtime.backend import limit_to_one_core

PART = 2**20  # values of a batch that a thread works on at a time: its temporaries stay in the cache

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Generator[Result, None, None]:
    """The results of `function` in the order of the items; at most `2 * threads` are computed ahead, to bound memory.

    An exception is raised in place of its result. Closing the iterator waits for the items that are being computed.
    """
    pool = ThreadPoolExecutor(threads)
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_parts(function: Callable[[slice], object], rows: int, parts: int = 1) -> None:
    """Call a function with spans of the rows of a batch, in threads that use a core each.

    Unlike torch's own threads they do not wait for each other after every operation, which on busy cores takes longer
    than the operation.

    Args:
        parts: spans for each thread, at most.
    """
    threads, is_inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def call(span: slice) -> None:
        with torch.inference_mode(is_inference):  # each thread has a mode of its own
            function(span)

    size = math.ceil(rows / (threads * parts))
    for _ in _pool(os.getpid(), threads).map(call, [slice(first, first + size) for first in range(0, rows, size)]):
        pass


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of a process; they are kept, because limiting one to a core takes a millisecond."""
    return ThreadPoolExecutor(threads, "vitmnist-parts", limit_to_one_core)
