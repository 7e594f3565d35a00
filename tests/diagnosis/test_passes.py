"""What is not part of a pass counts neither as work nor as waiting; test_stopwatch.py has loops of many kinds."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import SLOW_DATA, diagnose


def test_looking_at_a_loader_within_a_pass_is_neither_work_nor_waiting(tmp_path: Path) -> None:
    """Here by its length, which the validation itself asks for once."""
    script = f"""{SLOW_DATA}
class Counted(Slow):
    def __len__(self):
        time.sleep(0.5)
        return 12
for number, batch in enumerate(DataLoader(Slow(samples=12))):
    if number == 6:
        for batch in DataLoader(Counted()):
            pass
sys.exit(3)
"""
    _, report = diagnose(tmp_path, script, "--warm-up=0")
    assert report["steps"] == 24
    assert report["loaders"][1]["measuring_s"] >= 0.5
    assert 0.5 < report["loaders"][1]["waiting_s"] < 1.0
    assert report["work_s"] * 24 < 0.5


def test_the_verdict_of_a_loop_that_waits_is_not_that_of_the_plots_after_it(tmp_path: Path) -> None:
    """Nor are time of a step and cores."""
    plots = "\nbegan = time.thread_time()\nwhile time.thread_time() - began < 1:\n    pass\n"
    script = f"{SLOW_DATA}for batch in DataLoader(Slow(0.02)):\n    time.sleep(0.0005)\n{plots}sys.exit(3)\n"
    _, report = diagnose(tmp_path, script, "--warm-up=2")
    assert report["verdict"].startswith("input-bound: ")
    assert report["waiting_pct"] > 60
    assert report["work_s"] < 0.02
    assert report["cores"]["busy"] < 0.4
