"""Waiting, work and the duration of all passes agree with a stopwatch in the script."""

import json
from pathlib import Path
from textwrap import indent

import pytest

from tests.support.scripts import diagnose

POINTS = 3.0  # The largest difference in percentage points

STOPWATCH = """
import json, os, statistics, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.utils.data import DataLoader, Dataset

class Stopwatch:
    def __init__(self):
        self.began = None
        self.waited = 0.0
        self.steps = []
        self.last_steps = []  # Last steps of passes that are left early
        self.returned = None  # When the last batch was returned, while the pass goes on
    def __enter__(self):
        self.started = time.perf_counter()
        self.began = self.began or self.started
    def __exit__(self, *error):
        self.waited += time.perf_counter() - self.started
    def over(self, loader):
        with self:
            iterator = iter(loader)
        try:
            while True:
                with self:
                    batch = next(iterator, None)
                if batch is None:
                    return
                self.returned = time.perf_counter()
                yield batch
                self.end_step(self.steps)
        finally:  # The end of the workers after a break is not part of the loop.
            left = time.perf_counter()
            self.end_step(self.last_steps)
            del iterator
            self.began += time.perf_counter() - left
    def end_step(self, steps):
        if self.returned:
            steps.append(time.perf_counter() - self.returned)
            self.returned = None
    def report(self, loop):
        seconds = time.perf_counter() - self.began
        self.end_step(self.last_steps)
        # The last step of a pass left early counts as a median step. On an idle machine, it is as long.
        step = statistics.median_low(self.steps or self.last_steps or [0.0])
        seconds -= sum(max(0.0, last - step) for last in self.last_steps)
        time.sleep(0.2)  # The loaders and iterators stay alive after the loop.
        print("\\n" + json.dumps({"loop": loop, "seconds": seconds, "waited": self.waited}))

class Samples(Dataset):
    # In Lightning's loop, the stopwatch is here. Without workers, all waiting is fetching.
    def __init__(self, seconds=0.010, samples=40, watched=False):
        self.seconds, self.samples, self.watched = seconds, samples, watched
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 2
    def __getitems__(self, indices):
        if not self.watched:
            time.sleep(self.seconds)
            return [self[index] for index in indices]
        with watch:
            time.sleep(self.seconds)
            return [self[index] for index in indices]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x, labels=None):
        time.sleep(0.005)
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

def train(batches, seconds=0.005):
    for batch in batches:
        time.sleep(seconds)

time.sleep(0.2)
"""

LOOPS = {
    "epochs left early": """
for epoch in range(4):
    for number, batch in enumerate(watch.over(DataLoader(Slow(), 1, num_workers=2))):
        time.sleep(0.030)
        if number == 5:
            break
""",
    "single batches": """
loader = DataLoader(Slow(), 1)
for step in range(24):
    for batch in watch.over(loader):
        time.sleep(0.010)
        break
""",
    "zip of one loader": """
loader = DataLoader(Slow(samples=24), 1)
train(watch.over(zip(loader, loader)), 0.020)
""",
    "validation within an epoch": """
loader, validation = DataLoader(Slow(samples=12), 1), DataLoader(Slow(0.050, samples=12), 1)
for number, batch in enumerate(watch.over(loader)):
    time.sleep(0.030)
    if number % 6 == 3:
        with watch:
            batches = iter(validation)
        while True:
            with watch:
                batch = next(batches, None)
            if batch is None:
                break
            time.sleep(0.001)
""",
}

FRAMEWORKS = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Slow(), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(4):
    for x, labels in watch.over(loader):
        optimizer.zero_grad()
        accelerator.backward(model(x, labels)["loss"])
        optimizer.step()
""",
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, number):
        return self.model(*batch)["loss"]
    validation_step = training_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(Slow(0.050, watched=True), 4), DataLoader(Slow(0.050, samples=12, watched=True), 4))
""",
}
LOADERS = {"validation within an epoch": 2, "lightning": 2}
"""The number of loaders of a loop, if it is not 1."""


GROUPS = [pytest.param([*LOOPS], id="loops"), pytest.param([*FRAMEWORKS], id="frameworks", marks=pytest.mark.slow)]


@pytest.mark.parametrize("names", GROUPS)
def test_times_match_a_stopwatch(tmp_path: Path, names: list[str]) -> None:
    """All loops run in one process, which imports torch once. Each has its own stopwatch and class of dataset."""
    script = STOPWATCH
    for name in names:
        loop = indent((LOOPS | FRAMEWORKS)[name] + f"\nwatch.report({name!r})", "    ")
        script += f"\nwatch, Slow = Stopwatch(), type({name!r}, (Samples,), {{}})\ndef loop():\n{loop}\nloop()\n"
    # After a script that fails, no alternatives are timed.
    process, report = diagnose(tmp_path, f"{script}sys.exit(3)\n", "--warm-up=0")
    assert process.returncode == 3, process.stderr
    truths = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"loop"')]
    assert [truth["loop"] for truth in truths] == names
    measured = iter(report["loaders"])
    for truth in truths:
        loops = [next(measured) for _ in range(LOADERS.get(truth["loop"], 1))]
        expected = pytest.approx(100 * truth["waited"] / truth["seconds"], abs=POINTS)
        assert 100 * sum(loop["waiting_s"] for loop in loops) / truth["seconds"] == expected, (truth, loops)
        if len(loops) == 1:
            assert loops[0]["waiting_pct"] == expected, (truth, loops)
    assert next(measured, None) is None
    assert report["waiting_pct"] == pytest.approx(100 * report["waiting_s"] / report["seconds"])
