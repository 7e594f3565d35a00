"""Waiting, work and verdict are those of the passes over loaders, and not of what the script does besides."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.support.scripts import SLOW_DATA, diagnose

STEPS = 24
WORK_S, OTHER_S = 0.010, 0.3

# Loops of 24 steps, each of which waits 5 ms and works 10 ms.
LOOPS = {
    "exhausted": "for epoch in range(2):\n    for batch in DataLoader(Slow(samples=12)):\n        work()",
    "left early": """
loader = DataLoader(Slow())
for epoch in range(6):
    for number, batch in enumerate(loader, 1):
        work()
        if number == 4:
            break
""",
    "an iterator that stays": """
it = iter(DataLoader(Slow(samples=100)))
for step in range(24):
    next(it)
    work()
""",
    "a generator that stays": """
def cycle(loader):
    while True:
        yield from loader
batches = cycle(DataLoader(Slow(samples=10)))
for step in range(24):
    next(batches)
    work()
""",
    "persistent workers, left early": """
loader = DataLoader(Slow(0.005, samples=16), num_workers=1, persistent_workers=True, prefetch_factor=1)
for epoch in range(2):
    for number, batch in enumerate(loader, 1):
        time.sleep(0.010)
        if number == 12:
            break
""",
    "one batch ahead": """
def ahead(batches):
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held
for epoch in range(4):
    for batch in ahead(iter(DataLoader(Slow(samples=6)))):
        work()
    time.sleep(0.1)
""",
    "zip": "for batches in zip(DataLoader(Slow(0.002)), DataLoader(Slow(0.003))):\n    work()",
    "validation within an epoch": """
for number, batch in enumerate(DataLoader(Slow(samples=12))):
    work()
    if number == 6:
        for batch in DataLoader(Slow(samples=12)):
            work()
""",
    "a step that hardly works": "for batch in DataLoader(Slow()):\n    time.sleep(0.00001)",
}


def observed(folder: Path, loops: str) -> dict[str, Any]:
    """The report on loops with other work before and after them."""
    script = f"{SLOW_DATA}def work():\n    time.sleep({WORK_S})\nloader = DataLoader(Slow())\ntime.sleep({OTHER_S})\n"
    # A script that failed gets no advice, for which changes would be tried.
    ended, report = diagnose(folder, f"{script}{loops}\ntime.sleep({OTHER_S})\nsys.exit(3)\n", "--warm-up=0")
    assert ended.returncode == 3, ended.stderr
    report["printed"] = ended.stderr
    return report


def test_what_a_script_does_before_between_and_after_its_passes_does_not_count(tmp_path: Path) -> None:
    """Each loop is a function, which keeps its loaders and iterators while the script does something else."""
    loops = [f"def loop():\n{indent(loop, '    ')}\n    time.sleep({OTHER_S})\nloop()" for loop in LOOPS.values()]
    report = observed(tmp_path, "\n".join(loops))
    work_s = (len(LOOPS) - 1) * STEPS * WORK_S  # one hardly works
    assert report["steps"] == len(LOOPS) * STEPS
    assert report["work_s"] * report["steps"] + report["waiting_s"] == pytest.approx(report["seconds"])
    assert report["work_s"] * report["steps"] >= work_s, report["printed"]
    assert report["before_s"] >= OTHER_S
    assert report["between_s"] > (len(LOOPS) - 0.5) * OTHER_S  # 0.3 s of it are between epochs of one batch ahead
    assert report["after_s"] >= 1.9 * OTHER_S
    assert " the passes over the loaders" in report["printed"]


def test_work_on_batches_that_are_held_counts_until_the_next_pass(tmp_path: Path) -> None:
    loop = """
for epoch in range(2):
    for batch in list(DataLoader(Slow(samples=12))):
        work()
    time.sleep(0.5)
    for batch in DataLoader(Slow(samples=2)):
        pass
"""
    report = observed(tmp_path, loop)
    assert report["work_s"] * report["steps"] >= STEPS * WORK_S + 2 * 0.5
    assert report["after_s"] >= OTHER_S
    alone = "for step in range(24):\n    batch = next(iter(loader))\n    work()\nfor batch in loader: pass"
    report = observed(tmp_path, alone)
    assert report["work_s"] * report["steps"] >= STEPS * WORK_S
    assert report["after_s"] >= OTHER_S


def test_looking_at_a_loader_within_a_pass_is_neither_work_nor_waiting(tmp_path: Path) -> None:
    """Here by its length, which the validation itself asks for once."""
    loop = """
class Counted(Slow):
    def __len__(self):
        time.sleep(0.5)
        return 12
for number, batch in enumerate(DataLoader(Slow(samples=12))):
    if number == 6:
        for batch in DataLoader(Counted()):
            pass
"""
    report = observed(tmp_path, loop)
    assert report["steps"] == STEPS
    assert report["loaders"][1]["measuring_s"] >= 0.5
    assert 0.5 < report["loaders"][1]["waiting_s"] < 1.0
    assert report["work_s"] * STEPS < 0.5


def test_the_verdict_of_a_loop_that_waits_is_not_that_of_the_plots_after_it(tmp_path: Path) -> None:
    """Nor are time of a step, cores and --fail-above."""
    plots = "\nbegan = time.thread_time()\nwhile time.thread_time() - began < 1:\n    pass\n"
    script = f"{SLOW_DATA}for batch in DataLoader(Slow(0.02)):\n    time.sleep(0.0005)\n{plots}"
    ended, report = diagnose(tmp_path, script, "--warm-up=2", "--fail-above=50")
    assert ended.returncode == 1
    assert report["verdict"].startswith("input-bound: ")
    assert report["waiting_pct"] > 60
    assert report["work_s"] < 0.02
    assert report["cores"]["busy"] < 0.4
