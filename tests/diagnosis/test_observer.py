"""What is reported of the loaders of a script, and when nothing is concluded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import SLOW_DATA, diagnose
from vitmnist.diagnosis.advice import advise_on_script
from vitmnist.diagnosis.verdict import verdict
from vitmnist.runtime.cpu import Cores


def test_figures_of_each_loader_are_parts_of_the_scripts(tmp_path: Path) -> None:
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
    ended, report = diagnose(tmp_path, script, "--warm-up=3", "--fail-above=10")
    assert ended.returncode == 1
    assert "% of the time, which exceeds --fail-above 10%" in ended.stderr
    assert (report["complete"], report["exit_code"], report["steps"]) == (True, 0, 3 * 24 - 3 + 12 + 2 * (6 + 4))
    main, workers, stream, fast, slow, *rebuilt, _ = report["loaders"]
    assert [loader["batches"] for loader in report["loaders"]] == [21, 24, 24, 12, 12, 12, 8, 0]
    assert [loader["epochs"] for loader in (main, workers, stream)] == [2, 2, 2]
    assert sum(loader["waiting_pct"] for loader in report["loaders"]) == pytest.approx(report["waiting_pct"])
    assert report["work_s"] * report["steps"] + report["waiting_s"] == pytest.approx(report["seconds"])
    assert main["waiting_s"] >= 21 * 0.010
    assert 0 < workers["restarts_s"] < workers["waiting_s"]
    assert slow["waiting_s"] > max(fast["waiting_s"], 12 * 2 * 0.030)
    assert [(figures["num_loaders"], figures["are_rebuilt"]) for figures in rebuilt] == [(2, True), (2, True)]
    assert "  loaders     2 in turn, with the same line, settings, and class and length of the dataset" in ended.stderr
    assert "loader 8" not in ended.stderr  # nothing was observed of it
    assert "loader 3: Stream, batch size 2, num_workers=0, mine.py:" in ended.stderr
    assert "  observed    21 batches after 3 of the warm-up" in ended.stderr
    assert "-0" not in ended.stderr
    cores = Cores(**report["cores"])
    assert cores.workers > 0
    assert report["verdict"] == verdict(report["waiting_pct"], report["steps"], cores)
    assert report["advice"] == advise_on_script(report["waiting_pct"], cores)
    longest = max(map(waiting, report["loaders"]))
    for loader in report["loaders"]:
        assert len(loader["advice"]) == (waiting(loader) >= longest / 2)


OTHER_LOADERS = """
from torch.utils.data import dataloader

class Resuming(dataloader._SingleProcessDataLoaderIter):
    def __init__(self, loader, state):
        super().__init__(loader)

class StatefulDataLoader(DataLoader):  # as torchdata's
    def __iter__(self):
        self.iterator = Resuming(self, None)
        return self.iterator

if __name__ == "__main__":
    train(StatefulDataLoader(Slow(), batch_size=2))
    from fastai.data.load import DataLoader as Transforming
    train(Transforming(Slow(0.002), bs=2))
"""
FASTAI = """
import time
from torch.utils.data import DataLoader as Other

class DataLoader:  # with the attributes of fastai's
    def __init__(self, dataset, bs):
        self.dataset, self.bs, self.fake_l = dataset, bs, Other(dataset, bs)
    def __iter__(self):
        for batch in self.fake_l:
            time.sleep(0.005)  # to_device and after_batch
            yield batch
"""


def test_loaders_with_iterators_or_transforms_of_their_own_are_observed(tmp_path: Path) -> None:
    """Those of torchdata and fastai, whose attributes differ."""
    (tmp_path / "fastai" / "data").mkdir(parents=True)
    (tmp_path / "fastai" / "data" / "load.py").write_text(FASTAI)
    ended, report = diagnose(tmp_path, SLOW_DATA + OTHER_LOADERS, "--warm-up=0")
    stateful, fastai = report["loaders"]
    assert (stateful["batches"], fastai["batches"], report["steps"]) == (24, 24, 48)
    assert fastai["waiting_s"] >= 24 * (2 * 0.002 + 0.005)
    assert (fastai["sampler"], fastai["batch_size"], fastai["persistent_workers"]) == (None, 2, False)
    assert "loader 2: Slow of 24 samples, batch size 2, num_workers=0, mine.py:" in ended.stderr
    assert "refuses this loader: fastai.data.load.DataLoader is no torch.utils.data.DataLoader" in ended.stderr


def test_a_loader_that_is_not_observed_is_named_by_its_class(tmp_path: Path) -> None:
    script = """
class PipelineLoader:
    def __iter__(self):
        return iter(range(30))
loader = PipelineLoader()
for batch in loader:
    pass
"""
    ended, report = diagnose(tmp_path, script)
    assert report["reason"].endswith("; not observed: __main__.PipelineLoader, which is none of torch.utils.data")
    assert report["waiting_pct"] is None
    assert ended.returncode == 0


def waiting(loader: dict[str, Any]) -> float:
    return float(loader["waiting_pct"])


def test_a_loader_in_another_thread_has_figures_and_the_script_no_verdict(tmp_path: Path) -> None:
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
    ended, report = diagnose(tmp_path, script, "--warm-up=0", "--fail-above=100")
    assert (report["waiting_pct"], report["verdict"], report["loaders"][0]["batches"]) == (None, None, 24)
    assert "is iterated in another thread than the main one" in ended.stderr
    assert "ms, to another thread than the main one" in ended.stderr
    assert "failed: nothing was measured to compare with --fail-above 100%" in ended.stderr
    assert "waiting " not in ended.stderr


def test_few_steps_have_figures_and_no_verdict_and_other_processes_are_named(tmp_path: Path) -> None:
    """Of a rank that starts two Python processes, which may train, and another program."""
    script = f"""{SLOW_DATA}
import multiprocessing, subprocess
if __name__ == "__main__":
    for process in [multiprocessing.get_context("fork").Process(target=train, args=([],))]:
        process.start()
        process.join()
    subprocess.run([sys.executable, "-c", ""])
    subprocess.run(["true"])
    train(DataLoader(Slow(), batch_size=2, num_workers=1), epochs=1)
"""
    (tmp_path / "report.json").touch()
    ended, _ = diagnose(tmp_path, script, "--warm-up=0", RANK="1", WORLD_SIZE="2")
    report = json.loads((tmp_path / "report-rank1.json").read_text())
    assert report["verdict"] is None
    assert (report["steps"], report["waiting_pct"] > 0) == (12, True)
    assert (report["rank"], report["processes_not_observed"]) == ("1 of 2", 2)
    assert "vitmnist diagnose, rank 1 of 2: the script ended" in ended.stderr
    assert "not observed: 2 Python processes that the script has started; they may be what trains" in ended.stderr
    assert "  advice " not in ended.stderr


def test_a_loop_that_collects_batches_is_observed_up_to_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Its steps follow the requests: neither may the warm-up end in between, nor the observation."""
    script = f"""{SLOW_DATA}
for epoch in range(3):
    for batch in list(DataLoader(Slow(), batch_size=1)):
        time.sleep(0.005)
"""
    _, report = diagnose(tmp_path, script, "--warm-up=10", "--steps=30", "--stop")
    assert report["steps"] == 48
    assert report["waiting_s"] >= 48 * 0.005
    assert report["work_s"] >= 0.005


def test_a_loop_without_work_is_observed_and_stopped(tmp_path: Path) -> None:
    """Its requests follow each other as closely as those of a loop that collects batches."""
    script = f"{SLOW_DATA}for epoch in range(100):\n    for batch in DataLoader(Slow(), batch_size=2):\n        pass\n"
    ended, report = diagnose(tmp_path, script, "--warm-up=5", "--steps=20", "--stop")
    assert report["stopped"]
    assert 20 <= report["steps"] < 50
    assert report["waiting_pct"] > 90
    assert "the script was stopped, as --stop says" in ended.stderr
    assert "; use vitmnist.from_dataloader(loader), which decodes once and gives the same batches: " in ended.stderr
    assert " MiB of memory, which pay from epoch " in ended.stderr


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


def test_loaders_of_the_same_length_in_turn_are_not_said_to_be_rebuilt(tmp_path: Path) -> None:
    """As validation and test, which one function evaluates."""
    script = f"""{SLOW_DATA}
loaders = [DataLoader(Slow(), batch_size=2, num_workers=1) for split in range(2)]
for epoch in range(3):
    for loader in loaders:
        train(loader, epochs=1)
"""
    _, report = diagnose(tmp_path, script, "--warm-up=3")
    (figures,) = report["loaders"]
    assert (figures["num_loaders"], figures["are_rebuilt"]) == (2, False)
    assert "build the DataLoader once" not in str(figures["advice"])
