"""The result of a diagnosis: figures with their range, a table, a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from tabulate import tabulate

from vitmnist.diagnosis.verdict import FEW_STEPS, few, limit, milliseconds
from vitmnist.loaders.timing import Alternative, Figure
from vitmnist.runtime.memory import mib

LEAST_ROUNDS = 3  # of T and T2 in turn, below which there is no verdict


@dataclass(frozen=True)
class Diagnosis:
    """What limits a training loop. Times are seconds per batch; each figure has its range over blocks of batches.

    Args:
        loading_s: T1, loading alone.
        step_s: T2, the step over one batch that is already on the device.
        batch_s: T, both together.
        waiting_s: the part of T that the step waits for its batch.
        waiting_pct: the same in percent of T.
        first_batch_s: from the start of an epoch to its first batch.
        cores_busy: processor cores in use on average while loading and computing, those of workers included.
        steps: how many were made while T was measured.
        rounds: blocks of T, which took turns with those of T1, T2 and the alternatives.
        alternatives: other ways to load the same batches, the fastest first.
        notes: what could not be measured, and why.
    """

    loading_s: Figure
    step_s: Figure
    batch_s: Figure
    waiting_s: Figure
    waiting_pct: Figure
    first_batch_s: Figure
    cores_busy: Figure
    steps: int
    rounds: int
    device: str
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Input-bound, compute-bound or balanced, and the most that a loader could gain.

        The limit and the gain compare T with the step alone, because workers may take processor time from the step
        without making it wait.
        """
        if self.steps < FEW_STEPS:
            return f"{few(self.steps)}; give larger batches= or seconds="
        if self.rounds < LEAST_ROUNDS:
            return f"no verdict: it needs {LEAST_ROUNDS} rounds, and seconds= ended after {self.rounds}; give more"
        both_s = self.batch_s.median
        # An alternative that is faster than the step over a resident batch shows that more can be gained.
        others = {"without loading": self.step_s} | {
            f"with {row.name}": row.batch_s for row in self.alternatives if row.batch_s
        }
        best, best_s = min(((name, one.median) for name, one in others.items()), key=itemgetter(1))
        faster = f"{best} a batch takes {milliseconds(best_s)} instead of {milliseconds(both_s)}"
        if best_s >= both_s:
            best_s, faster = both_s, f"nothing measured is faster than the {milliseconds(both_s)} of a batch"
        # Of the ends of the ranges: with the medians, noise let a loader exceed the bound.
        most = self.batch_s.high / min(self.batch_s.low, *(one.low for one in others.values()))
        return (
            f"{limit(100 * (1 - best_s / both_s))}: {self.waiting_pct.median:.0f}% of the time is spent waiting for "
            f"data; {faster}; at the "
            f"ends of their ranges, no loader can make the loop more than {most:.3g} times faster"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values; times in seconds."""
        return asdict(self) | {"verdict": self.verdict}

    def __str__(self) -> str:
        t1, t2, both = self.loading_s, self.step_s, self.batch_s
        rows = [
            ("loading alone (T1)", t1.text(milliseconds)),
            ("step alone, one resident batch (T2)", t2.text(milliseconds)),
            ("both together (T)", both.text(milliseconds)),
            ("waiting for data", self.waiting_pct.text("{:.0f}%".format)),
            ("first batch of an epoch", self.first_batch_s.text(milliseconds)),
            ("batches per second", Figure(1 / both.median, 1 / both.high, 1 / both.low).text("{:,.1f}".format)),
            ("CPU cores busy", self.cores_busy.text("{:.1f}".format)),
        ]
        parts = [tabulate(rows, tablefmt="plain"), self.verdict]
        parts += [self._table_of_alternatives()] if self.alternatives else []
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join(parts)

    def _table_of_alternatives(self) -> str:
        titles = ("what if", "per batch", "waiting", "epoch", "set-up", "memory", "identical batches")
        rows = [
            (
                row.name,
                row.batch_s.text(milliseconds),
                f"{100 * row.waiting_s.median / row.batch_s.median:.0f}%",
                "–" if row.epoch_s is None else f"{row.epoch_s:.3g} s",
                f"{row.set_up_s:.3g} s",
                "–" if row.memory_bytes is None else mib(row.memory_bytes),
                row.identical,
            )
            for row in self.alternatives
            if row.batch_s and row.waiting_s
        ]
        table = tabulate(rows, titles, tablefmt="plain", disable_numparse=True)
        return "\n".join([table, *(f"refused: {row.name}: {row.refused}" for row in self.alternatives if row.refused)])
