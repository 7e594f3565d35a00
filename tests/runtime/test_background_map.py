"""Work in threads: order, errors, bounds and ends, and the cores that it leaves to others."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from vitmnist.runtime.background_map import BackgroundMap, map_slices


@pytest.mark.parametrize(("error", "raised"), [(SystemExit, SystemExit), (StopIteration, RuntimeError)])
def test_results_come_in_order_and_an_error_in_place_of_its_result(
    error: type[BaseException], raised: type[BaseException]
) -> None:
    """`StopIteration` would end the consumer's loop early, and becomes a `RuntimeError`, as in a generator."""

    def fail_at_2(item: int) -> int:
        time.sleep(0.01 * (item % 2))
        if item == 2:
            raise error
        return -item

    results = BackgroundMap(fail_at_2, range(6), threads=3, max_ahead=2)
    assert [next(results), next(results)] == [0, -1]
    with pytest.raises(raised):
        next(results)
    assert list(results) == [-3, -4, -5]


def test_items_are_taken_by_the_consumer_and_no_further_ahead_than_the_bound() -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in count():
            taken.append(threading.current_thread())
            yield item

    results = BackgroundMap(abs, items(), threads=2, max_ahead=3)
    assert not taken
    for index in range(3):
        next(results)
        assert taken == [threading.main_thread()] * (index + 4)


@pytest.mark.parametrize("end", [lambda results: results[0].close(), list.clear], ids=["close", "clear"])
def test_threads_end_with_the_map(end: Callable[[list[BackgroundMap[int, int]]], None]) -> None:
    before = set(threading.enumerate())
    results = [BackgroundMap(abs, count(), threads=2, max_ahead=3)]
    next(results[0])
    assert len(set(threading.enumerate()) - before) == 2
    gc.disable()
    try:
        end(results)
        assert not set(threading.enumerate()) - before
    finally:
        gc.enable()


def test_an_error_in_a_part_is_raised_when_no_thread_writes_to_the_batch_any_more() -> None:
    written = []

    def write(span: slice) -> None:
        if not span.start:
            raise ValueError("the first part")
        time.sleep(0.05)
        written.append(span.start)

    with pytest.raises(ValueError, match="the first part"):
        map_slices(write, 3, size=1, threads=2)
    assert written == [1, 2]
