"""Which runs were at work at the same time on one machine, where each takes from the others what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitmnist.report.runs import Run

Span = tuple[float, float]


def marked(runs: Sequence[Run]) -> list[Run]:
    """The runs, each with whether it was at work while another one was."""
    spans = sorted(
        (host, start, end, number)
        for number, run in enumerate(runs)
        if (host := (run.result.get("environment") or {}).get("host"))
        for start, end in at_work(run)
    )
    disturbed: set[int] = set()
    under_way: list[tuple[str, float, int]] = []
    for host, start, end, number in spans:
        under_way = [other for other in under_way if other[0] == host and other[1] > start]
        beside = {other for _, _, other in under_way} - {number}
        disturbed |= {number, *beside} if beside else set()
        under_way.append((host, end, number))
    return [replace(run, disturbed=number in disturbed) for number, run in enumerate(runs)]


def at_work(run: Run) -> list[Span]:
    """When a run was at work, in seconds since 1970: its last sitting, and the epochs of those before it."""
    began, ended = run.result.get("began_at"), run.result.get("ended_at")
    if not began or not ended:  # of a version that did not record it
        return []
    epochs = ((epoch["ended_at"] - epoch["epoch_s"], epoch["ended_at"]) for epoch in run.epochs)
    return [*(span for span in epochs if span[1] < began), (began, ended)]
