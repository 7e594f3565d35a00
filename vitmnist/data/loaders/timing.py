"""The one harness that times a loader with a training step, in blocks that take turns; of `auto` and `diagnose`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
from tqdm import tqdm

from vitmnist.data.loaders.batch_stream import BatchStream
from vitmnist.errors import UserError, first_line
from vitmnist.runtime.cpu import available_cores

BLOCKS = 5  # of each candidate are timed; their range is the noise
WARM_UP = 2  # batches of the first block, which is not counted: workers start, memory is touched for the first time
NOTICEABLE_WAIT = 0.05  # the share of the time from which the step counts as waiting for data
MOST_SETTLE_S = 0.5
WORKER_COUNTS = (0, 2, 4, 8, 16, 32, 64)
BUSY = 0.75  # the share of the cores from which more workers than cores are not tried
DOUBLING_PAYS = 0.1  # the share of the time that workers beyond the cores must save for twice as many to be tried

Step = Callable[..., object]
"""A user's training step: `step(batch)`, or `step(images, labels)` if it has several required arguments."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Figure:
    """A measured value: the median over blocks of batches, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure:
        """The figure of the values of all blocks."""
        values = list(values)
        return cls(median(values), min(values), max(values))

    def text(self, write: Callable[[float], str] = "{:.3g}".format) -> str:
        """`median (low–high)`; without the range if it is a single value."""
        return write(self.median) + ("" if self.low == self.high else f" ({write(self.low)}–{write(self.high)})")


@dataclass
class Alternative:
    """A way to load batches, timed with the training step; or the reason why it cannot be used.

    Args:
        batch_s: seconds per batch, loading and step together.
        waiting_s: the part of them that is spent waiting for the batch.
        set_up_s: seconds before the first batch; for loaders that decode once, those of the whole set.
        memory_bytes: what it keeps in memory, or on the device.
        identical: whether its batches are those of the DataLoader, bit for bit; otherwise why not.
    """

    name: str
    batch_s: Figure | None = None
    waiting_s: Figure | None = None
    epoch_s: float | None = None
    set_up_s: float | None = None
    memory_bytes: int | None = None
    identical: str = ""
    refused: str | None = None


@dataclass
class Block:
    """Seconds per batch, how many of them were spent waiting, and the processor cores that were busy meanwhile."""

    batch_s: float
    waiting_s: float
    cores: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the step waits noticeably for data."""
        return self.waiting_s > NOTICEABLE_WAIT * self.batch_s


@dataclass
class Timed:
    """Batches, and a step over each, timed in blocks that take turns with those of others.

    Args:
        step: None to time loading alone.
        prepare: called before each block, because the step may have worked for another loader meanwhile.
        row: what is filled in, if this is one way to load of several; an error then refuses it alone.
        first: the first block, which is not counted.
    """

    stream: BatchStream
    step: Callable[[Any], object] | None = None
    prepare: Callable[[], object] | None = None
    row: Alternative | None = None
    first: Block | None = None
    blocks: list[Block] = field(default_factory=list)

    def time_block(self, size: int = WARM_UP) -> Block | None:
        """Add a block of `size` batches; None if it failed, or there are none left."""
        if self.row and self.row.refused:
            return None
        try:
            if self.prepare:
                self.prepare()
            started, cpu_s = time.perf_counter(), _cpu_seconds()
            found = self.stream.time_block(size, self.step)
        except Exception as error:  # whatever it is, the step has worked with another loader, which has no row
            if not self.row:
                raise
            self.row.refused = reason(error)
            self.stream.close()
            return None
        if not found:
            return None
        block = Block(*found, (_cpu_seconds() - cpu_s) / (time.perf_counter() - started))
        if self.first:
            self.blocks.append(block)
        self.first = self.first or block
        return block

    def complete_row(self) -> None:
        """Fill in what was measured."""
        if self.row and not self.blocks:
            self.row.refused = self.row.refused or "it gave no batch"
        if self.row and not self.row.refused:
            self.row.batch_s = Figure.of(block.batch_s for block in self.blocks)
            self.row.waiting_s = Figure.of(block.waiting_s for block in self.blocks)


@dataclass
class Bench:
    """Loaders that are built next to each other, with a row of the table each; those that fail are refused alone.

    Args:
        stack: closes what is built.
    """

    stack: ExitStack
    rows: list[Alternative] = field(default_factory=list)
    turns: list[Timed] = field(default_factory=list)

    def add(self, row: Alternative, build: Callable[[ExitStack], Timed]) -> Timed | None:
        """Build a candidate and time its first block; None if the row says why it cannot be used.

        Args:
            build: gives what to time, and leaves to the stack what must be closed.
        """
        self.rows.append(row)
        with ExitStack() as built:
            try:
                timed = build(built)
                timed.row = row
                built.callback(timed.stream.close)
                timed.time_block()
            except Exception as error:  # a sample that the loop never reads may be broken
                row.refused = reason(error)
            if row.refused is None:
                self.stack.push(built.pop_all())
                self.turns.append(timed)
                return timed
        row.refused = row.refused.removeprefix(f"{row.name}: ")
        return None


def take_turns(turns: list[Timed], batches: int, seconds: float) -> int:
    """Time blocks of each, after their first ones; in several rounds, each of which begins with another.

    Args:
        batches: how many each times in all; fewer if `seconds` would not be enough.

    Returns:
        The number of rounds: fewer than `BLOCKS` if the time is over.
    """
    deadline = time.perf_counter() + seconds
    round_s = sum(timed.first.batch_s for timed in turns if timed.first)
    affordable = int(seconds / (BLOCKS * round_s)) if round_s else batches
    size = min(max(affordable, 1), -(-batches // BLOCKS))
    for number in range(BLOCKS):
        if number and time.perf_counter() > deadline:
            return number
        shift = number % max(len(turns), 1)
        ordered = [*turns[shift:], *turns[:shift]]
        for timed in tqdm(ordered, f"round {number + 1} of {BLOCKS}", leave=False, disable=None):
            block = timed.time_block(size)
            # Its queues fill again, which must not disturb what is timed next.
            time.sleep(min(timed.stream.buffered * (block.batch_s if block else 0.0), MOST_SETTLE_S))
    return BLOCKS


def try_workers(
    given: Timed, num_workers: int, build: Callable[[int], Timed | None], counts: list[int] | None = None
) -> None:
    """Warm up other numbers of worker processes: as many as there are cores, and more where those are not busy.

    Samples that compute gain nothing from more workers than cores; samples that wait for a disk or a network do.

    Args:
        given: the candidate as it is, with `num_workers`.
        build: makes a candidate with another number, and times its first block; None if that failed.
        counts: just these; None decides by what is measured.
    """
    cores = available_cores()
    last, best_s, pays = given.first, float("inf"), True
    for workers in WORKER_COUNTS if counts is None else counts:
        is_beyond = workers > max(cores, 2)
        if counts is None and (not last or not last.waits or (is_beyond and (last.cores > BUSY * cores or not pays))):
            return
        timed = given if workers == num_workers else build(workers)
        last = timed.first if timed else None
        pays = not is_beyond or (last is not None and last.batch_s < (1 - DOUBLING_PAYS) * best_s)
        best_s = min(best_s, last.batch_s) if last else best_s


def calling(step: Step) -> Callable[[Any], object]:
    """A function of one batch: `step(batch)`, or `step(*batch)` if the step has several required arguments."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return step
    required = [one for one in parameters if one.kind in POSITIONAL and one.default is one.empty]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(required) < 2 and not takes_any:
        return step
    return lambda batch: step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def reason(error: Exception) -> str:
    """Why a loader is refused, in one line."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def _cpu_seconds() -> float:
    """Processor time of this process and its living children so far."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()  # in steps of 10 ms
            total += times.user + times.system
    return total
