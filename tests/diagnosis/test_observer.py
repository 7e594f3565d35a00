"""The report on the loaders of a script, and when it has no verdict."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import SLOW_DATA, diagnose
from vitmnist.diagnosis.loop import OTHER_THREAD, LoaderInfo
from vitmnist.diagnosis.report import NO_LOADER


def test_loops_of_each_kind_are_observed_and_others_tried_for_those_that_wait(tmp_path: Path) -> None:
    """With and without workers; map-style and iterable datasets, loaders in lockstep, and one built per epoch."""
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
    main, workers, stream, fast, slow, *rebuilt = report["loops"]
    assert [loop["batches"] for loop in report["loops"]] == [21, 24, 24, 12, 12, 12, 8]
    assert [loop["passes"] for loop in (main, workers, stream)] == [2, 2, 2]
    assert report["waiting_pct"] == pytest.approx(100 * report["waiting_s"] / report["seconds"])
    assert main["waiting_s"] >= 21 * 0.010
    assert main["step_s"] >= 0.002
    assert slow["waiting_s"] > max(fast["waiting_s"], 12 * 2 * 0.030)
    assert [loop["passes"] for loop in rebuilt] == [2, 2]
    assert "loader 3: Stream, batch size 2, num_workers=0 (mine.py:" in process.stderr
    assert "  21 batches in 2 passes: waiting " in process.stderr
    assert not fast["rows"], "the script waits for it less than half as long"
    baseline, *others = slow["rows"]
    assert baseline["name"] == "as it is"
    assert baseline["epoch_s"]["low"] > 12 * 2 * 0.030
    assert {row["name"] for row in others} >= {"num_workers=2", "from_dataloader"}
    assert all(row["error"] is None for row in slow["rows"])
    assert (
        f"  change  {slow['loader']['where']}   {slow['change']}\n  (expected, with an imitated step)" in process.stderr
    )


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
    assert [loop["batches"] for loop in report["loops"]] == [12, 24, 20]
    assert [loop["passes"] for loop in report["loops"]] == [2, 2, 2]
    assert all(12 * 2 * 0.005 <= loop["waiting_s"] < loop["seconds"] - 9 * 0.002 for loop in report["loops"])
    assert not any(loop["rows"] for loop in report["loops"]), "the script failed"


def test_a_loader_that_is_none_of_torch_is_named_by_its_class(tmp_path: Path) -> None:
    script = """
class PipelineLoader:
    def __iter__(self):
        return iter(range(30))
class Pipeline(PipelineLoader):
    pass
loader = Pipeline()
for batch in loader:
    pass
"""
    process, report = diagnose(tmp_path, script)
    assert (report["incomplete"], report["not_observed"]) == (NO_LOADER, ["__main__.Pipeline"])
    assert "not observed: __main__.Pipeline, which is none of torch.utils.data" in process.stderr
    assert (report["waiting_pct"], process.returncode) == (None, 0)


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
    (loop,) = report["loops"]
    assert (report["waiting_pct"], report["bottleneck"]) == (None, None)
    assert (loop["batches"], loop["waiting_pct"], loop["unmeasured_reason"]) == (24, None, OTHER_THREAD)
    assert "verdict" not in process.stderr


def test_few_steps_have_figures_and_no_verdict_and_each_rank_a_file(tmp_path: Path) -> None:
    script = f"{SLOW_DATA}train(DataLoader(Slow(), batch_size=2, num_workers=1), epochs=1)"
    (tmp_path / "report.json").touch()
    process, _ = diagnose(tmp_path, script, "--warm-up=0", RANK="1", WORLD_SIZE="2")
    report = json.loads((tmp_path / "report-rank1.json").read_text())
    assert (report["steps"], report["waiting_pct"] > 0, report["rank"]) == (12, True, 1)
    assert "vitmnist diagnose, rank 1: the script ended" in process.stderr
    assert "verdict: no verdict: it needs 20 steps, and only 12 were measured" in process.stderr


def test_a_loop_without_work_is_observed_and_stopped(tmp_path: Path) -> None:
    """Its requests follow each other as closely as those of a loop that collects its batches."""
    script = f"{SLOW_DATA}for epoch in range(100):\n    for batch in DataLoader(Slow(), batch_size=2):\n        pass\n"
    process, report = diagnose(tmp_path, script, "--warm-up=5", "--steps=20", "--stop")
    assert (report["stopped"], report["steps"]) == (True, 20)
    assert report["waiting_pct"] > 90
    assert "the script was stopped, as --stop says" in process.stderr
    (loop,) = report["loops"]
    assert loop["change"] == "loader = vitmnist.from_dataloader(loader)"
    assert LoaderInfo(**loop["loader"]).samples == 24
