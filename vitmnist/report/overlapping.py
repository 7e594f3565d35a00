"""Runs that overlapped in time on one machine: each slowed the other down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitmnist.report.runs import Run

Span = tuple[float, float]


def mark_overlapping(runs: Sequence[Run]) -> list[Run]:
    """The runs, with `overlapping` set on those that ran while another run did on the same host."""
    spans = sorted(
        (host, start, end, number)
        for number, run in enumerate(runs)
        if (host := str(run.environment.get("host") or ""))
        for start, end in active_spans(run)
    )
    overlapping: set[int] = set()
    active: list[tuple[str, float, int]] = []
    for host, start, end, number in spans:
        active = [other for other in active if other[0] == host and other[1] > start]
        others = {other for _, _, other in active} - {number}
        overlapping |= {number, *others} if others else set()
        active.append((host, end, number))
    return [replace(run, overlapping=number in overlapping) for number, run in enumerate(runs)]


def active_spans(run: Run) -> list[Span]:
    """When a run was active, in seconds since 1970: since it was last started or resumed, and its epochs before."""
    began, ended = run.result.get("began_at"), run.result.get("ended_at")
    if not began or not ended:  # records of old versions
        return []
    epochs = (
        (epoch["ended_at"] - (epoch.get("epoch_s") or 0.0), epoch["ended_at"])
        for epoch in run.epochs
        if epoch.get("ended_at")
    )
    return [*(span for span in epochs if span[1] < began), (began, ended)]
