"""The report on a script describes all its loaders, and has a verdict only if the waiting is known."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import SLOW_DATA, diagnose
from vitmnist.diagnosis.observed_loader import LoaderInfo


def test_loops_of_each_kind_are_observed_and_others_tried_for_those_that_wait(tmp_path: Path) -> None:
    """The loops have workers or none, map-style or iterable datasets, a zip, or a new loader for each epoch."""
    script = f"""{SLOW_DATA}
train(DataLoader(Slow(), batch_size=2))
train(DataLoader(Slow(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
train(DataLoader(Stream(), batch_size=2))
for batches in zip(DataLoader(Slow(0), batch_size=2), DataLoader(Slow(0.030), batch_size=2)):
    pass
for epoch in range(2):
    train(DataLoader(Slow(), batch_size=4, shuffle=True), epochs=1)
    train(DataLoader(Slow(samples=16), batch_size=4), epochs=1)
iterator = iter(DataLoader(Slow(), batch_size=2, num_workers=1))
assert len(iterator) == 12 and iter(iterator) is iterator and iterator._num_workers == 1
"""
    process, report = diagnose(tmp_path, script, "--warm-up=3")
    assert process.returncode == 0, process.stderr
    assert (report["incomplete"], report["exit_code"], report["steps"]) == (None, 0, 24)
    main, workers, stream, fast, slow, *rebuilt = report["loaders"]
    assert [loader["batches"] for loader in report["loaders"]] == [21, 24, 24, 12, 12, 12, 8]
    assert [loader["passes"] for loader in (main, workers, stream)] == [2, 2, 2]
    assert report["waiting_pct"] == pytest.approx(100 * report["waiting_s"] / report["seconds"])
    assert main["waiting_s"] >= 21 * 0.010
    assert main["step_s"] >= 0.002
    assert slow["waiting_s"] > max(fast["waiting_s"], 12 * 2 * 0.030)
    assert [loader["passes"] for loader in rebuilt] == [2, 2]
    assert "loader 3: Stream, batch size 2, num_workers=0 (mine.py:" in process.stderr
    assert "  21 batches in 2 passes: waiting " in process.stderr
    assert not fast["timings"], "the script waits for it less than half as long"
    baseline, *others = slow["timings"]
    assert baseline["name"] == "as it is"
    assert baseline["epoch_s"]["low"] > 12 * 2 * 0.030
    assert {timing["name"] for timing in others} >= {"num_workers=2", "from_dataloader"}
    assert all(timing["error"] is None for timing in slow["timings"])
    change = f"  change  {slow['info']['where']}   {slow['change']}\n"
    assert f"{change}  (expected, with an imitated step)" in process.stderr


OTHER_LOADERS = """
from torch.utils.data import dataloader

class Resuming(dataloader._SingleProcessDataLoaderIter):
    def __init__(self, loader, state):
        super().__init__(loader)

class StatefulDataLoader(DataLoader):  # Like torchdata's
    def __iter__(self):
        self.iterator = Resuming(self, None)
        return self.iterator

class Ahead(DataLoader):  # Like Accelerate's
    def __iter__(self):
        batches = super().__iter__()
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held

class Keeping(DataLoader):  # Returns one iterator for all epochs, like a loader of Ultralytics
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()
    def __iter__(self):
        return self.iterator

keeping = Keeping(Slow(), batch_size=2)
for _ in range(2):
    for batch, _ in zip(range(6), keeping):
        time.sleep(0.002)
train(StatefulDataLoader(Slow(), batch_size=2))
train(Ahead(Slow(samples=20), batch_size=2))
sys.exit(3)
"""


def test_subclasses_with_an_iteration_of_their_own_are_observed_once(tmp_path: Path) -> None:
    _, report = diagnose(tmp_path, SLOW_DATA + OTHER_LOADERS, "--warm-up=0")
    assert [loader["batches"] for loader in report["loaders"]] == [12, 24, 20]
    assert [loader["passes"] for loader in report["loaders"]] == [2, 2, 2]
    assert all(12 * 2 * 0.005 <= loader["waiting_s"] < loader["seconds"] - 9 * 0.002 for loader in report["loaders"])
    assert not any(loader["timings"] for loader in report["loaders"]), "the script failed"


def test_a_loader_in_another_thread_has_times_and_the_script_no_verdict(tmp_path: Path) -> None:
    script = f"""{SLOW_DATA}
import queue, threading
batches = queue.Queue(4)
def fill():
    for batch in DataLoader(Slow(), batch_size=1):
        batches.put(batch)
    batches.put(None)
threading.Thread(target=fill).start()
while batches.get() is not None:
    time.sleep(0.002)
"""
    process, report = diagnose(tmp_path, script, "--warm-up=0")
    (loader,) = report["loaders"]
    assert (report["waiting_pct"], report["bottleneck"]) == (None, None)
    assert (loader["batches"], loader["waiting_pct"]) == (24, None)
    assert "24 batches in 1 pass: waiting in another thread of " in process.stderr
    assert "verdict" not in process.stderr


def test_few_steps_have_figures_and_no_verdict_and_each_rank_a_file(tmp_path: Path) -> None:
    # A busy machine can suspend the loop in any call, here for 50 ms in each step. This counts as waiting.
    slow_clock = "import vitmnist.diagnosis.observer as module\nmodule.process_time = lambda: time.sleep(0.05) or 0.0\n"
    script = f"{SLOW_DATA}{slow_clock}train(DataLoader(Slow(), batch_size=2, num_workers=1), epochs=1)"
    (tmp_path / "report.json").touch()
    process, _ = diagnose(tmp_path, script, "--warm-up=0", RANK="1", WORLD_SIZE="2")
    report = json.loads((tmp_path / "report-rank1.json").read_text())
    assert (report["steps"], report["waiting_s"] >= 12 * 0.05, report["rank"]) == (12, True, 1)
    assert "vitmnist diagnose, rank 1: the script ended" in process.stderr
    assert "verdict: no verdict: it needs 20 steps, and only 12 were measured" in process.stderr


def test_a_loop_without_work_is_observed_and_stopped(tmp_path: Path) -> None:
    script = f"{SLOW_DATA}for epoch in range(100):\n    for batch in DataLoader(Slow(), batch_size=2):\n        pass\n"
    process, report = diagnose(tmp_path, script, "--warm-up=5", "--steps=20", "--stop")
    assert (report["stopped"], report["steps"]) == (True, 20)
    assert report["waiting_pct"] > 90
    assert "the script was stopped by --stop" in process.stderr
    (loader,) = report["loaders"]
    assert loader["change"] == "loader = vitmnist.from_dataloader(loader)"
    assert LoaderInfo(**loader["info"]).samples == 24
