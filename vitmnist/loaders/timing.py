"""Times loaders with a training step, in blocks that take turns; used by `auto` and `diagnose`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from traceback import clear_frames
from typing import Any, NamedTuple

from tqdm import tqdm

from vitmnist.errors import UserError, first_line
from vitmnist.loaders.batch_stream import BatchStream
from vitmnist.runtime.cpu import BUSY, NOTICEABLE, CpuTime, available_cores

BLOCKS = 5  # of each candidate are timed; their range is the noise
WARM_UP = 2  # batches of the first block, which is not counted: workers start, memory is touched for the first time
MOST_SETTLE_S = 0.5
WORKER_COUNTS = (0, 2, 4, 8, 16, 32, 64)
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


class Block(NamedTuple):
    """Seconds per batch, how many of them were spent waiting, and the processor cores that were busy meanwhile."""

    batch_s: float
    waiting_s: float
    cores: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the step waits noticeably for data."""
        return self.waiting_s > NOTICEABLE * self.batch_s


@dataclass
class Timed:
    """Batches, and a step over each, timed in blocks that take turns with those of others.

    Args:
        step: None to time loading alone.
        row: the row to fill in, if this is one of several ways to load; an error then refuses this row alone.
        first: the first block, which is not counted.
    """

    stream: BatchStream
    step: Callable[[Any], object] | None = None
    row: Alternative | None = None
    first: Block | None = None
    blocks: list[Block] = field(default_factory=list)

    def time_block(self, size: int = WARM_UP) -> Block | None:
        """Add a block of `size` batches; None if it failed, or there are none left."""
        if self.row and self.row.refused:
            return None
        try:
            began = CpuTime.now()
            found = self.stream.time_block(size, self.step)
        except Exception as error:
            self.stream.close()
            if not self.row:  # it is the step that fails
                raise
            self.row.refused = reason(error, self.row.name)
            # torch's wrapper of a worker's error refers to its own frame, so that the frames would keep the workers.
            clear_frames(error.__traceback__)
            return None
        if not found:
            return None
        block = Block(*found, CpuTime.now().cores_since(began).busy)
        if self.first:
            self.blocks.append(block)
        self.first = self.first or block
        return block

    def complete_row(self, default: Sequence[Block] = ()) -> None:
        """Fill in what was measured; without a block, `default`."""
        blocks = self.blocks or default
        if self.row and not self.row.refused:
            self.row.refused = None if blocks else "it gave no batch"
            self.row.batch_s = Figure.of(block.batch_s for block in blocks) if blocks else None
            self.row.waiting_s = Figure.of(block.waiting_s for block in blocks) if blocks else None


@dataclass
class Bench:
    """Loaders that are built next to each other, with a row of the table each; those that fail are refused alone."""

    stack: ExitStack  # closes what is built
    rows: list[Alternative] = field(default_factory=list)
    turns: list[Timed] = field(default_factory=list)

    def add(self, name: str, build: Callable[[Alternative, ExitStack], Timed], identical: str = "") -> Timed | None:
        """Build a candidate and time its first block; None if its row says why it cannot be used.

        Args:
            build: returns what to time, fills in its row, and adds to the stack what must be closed.
        """
        row = Alternative(name, identical=identical)
        self.rows.append(row)
        with ExitStack() as built:
            try:
                timed = build(row, built)
            except Exception as error:  # a sample that the loop never reads may be broken
                row.refused = reason(error, row.name)
                return None
            timed.row = row
            built.callback(timed.stream.close)
            timed.time_block()
            if row.refused:
                return None
            self.stack.push(built.pop_all())
        self.turns.append(timed)
        return timed


def take_turns(turns: list[Timed], batches: int, seconds: float) -> int:
    """Time further blocks of each, in several rounds that each begin with another one.

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
        for timed in tqdm(
            [*turns[shift:], *turns[:shift]], f"round {number + 1} of {BLOCKS}", leave=False, disable=None
        ):
            if block := timed.time_block(size):
                # Its queues fill again, which must not disturb what is timed next.
                time.sleep(min(timed.stream.buffered * block.batch_s, MOST_SETTLE_S))
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
    for workers in counts or ():
        if workers != num_workers:
            build(workers)
    cores, last, best_s = available_cores(), given.first, float("inf")
    for workers in WORKER_COUNTS if counts is None else ():
        is_beyond = workers > max(cores, 2)
        if not last or not last.waits or (is_beyond and last.cores > BUSY * cores):
            return
        timed = given if workers == num_workers else build(workers)
        last = timed.first if timed else None
        if last and is_beyond and last.batch_s > (1 - DOUBLING_PAYS) * best_s:
            return
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


def reason(error: Exception, name: str = "") -> str:
    """Why a loader is refused, in one line, without its name."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + first_line(error).removeprefix(f"{name}: ")
