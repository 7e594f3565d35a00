"""A loader is timed with the step that will train, for about as long as asked, and without a trace."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.conftest import BRIEF, Train
from vitmnist import make_loader
from vitmnist.data.loaders import Loader, batch_stream
from vitmnist.data.loaders.auto import AutoOptions, select_loader
from vitmnist.data.loaders.base import Batches
from vitmnist.data.loaders.batch_stream import BatchStream
from vitmnist.data.loaders.timing import Timed
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.training import setup
from vitmnist.training.cuda_graph import GraphedStep
from vitmnist.training.step_options import StepConfig

TENSORS = TensorSet(torch.zeros(23, 3), torch.zeros(23))


def test_timing_takes_about_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(batches: Iterable[object], *rest: object) -> tuple[float, float]:
        asked.append(len(list(batches)))
        return 0.1 * asked[-1], 0.05 * asked[-1]

    monkeypatch.setattr(batch_stream, "time_batches", run)
    options = AutoOptions(batches=30, seconds=1.0, candidates=["ram"])
    device = torch.device("cpu")
    sampler = EpochSampler(23, 2, 0)

    def timed_of(loader: Loader) -> Timed:
        return Timed(BatchStream(loader, device), lambda batch: None)

    selection = select_loader(options, TENSORS, sampler, device, timed_of=timed_of)
    # The model alone and the candidate take turns: two batches after the first of an epoch, then five blocks of two.
    assert [size for size in asked if size > 1] == [2] * 2 + [2] * 10
    assert selection.model_alone_s == pytest.approx(1.2)
    (row,) = selection.record()["candidates"]
    assert (row["epoch_s"], row["data_wait_s"]) == pytest.approx((1.2, 0.6))


def test_a_loader_is_judged_by_how_fast_it_makes_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers give four batches at once and then nothing for a while; eight batches were ready at the start."""
    now = 0.0

    class Bursts(Loader):
        num_workers, buffered = 4, 8

        def batches(self, number: int, start: int) -> Batches:
            nonlocal now
            for batch in range(start, len(self)):
                now += 4.0 if batch % 4 == 0 and (number or batch >= 8) else 0.0
                yield torch.zeros(2, 3), torch.zeros(2)

    def run(batches: Iterable[object], *rest: object) -> tuple[float, float]:
        before = now
        list(batches)
        return now - before, now - before

    monkeypatch.setattr(batch_stream, "time_batches", run)
    for size in (100, 24):  # also where an epoch is too short
        stream = BatchStream(Bursts(EpochSampler(size, 2, 0)), torch.device("cpu"))
        stream.time_block(2)
        assert stream.time_block(3) == (1.0, 1.0)


def test_a_step_of_the_user_is_timed_with_each_loader(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    calls = []

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        calls.append(len(labels))
        model(images).sum().backward()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with make_loader("auto", TENSORS, batch_size=5, device="cpu", seed=0, candidates=["ram"], step=step) as loader:
        assert loader.selection.record()["candidates"][0]["data_wait_s"] is not None
    assert set(calls) == {5}
    assert torch.equal(before, torch.get_rng_state()), "how much a step draws depends on the time that it takes"
    assert re.search(r"candidate +set-up, s +epoch, s +range +waiting for data\n", capsys.readouterr().err)


def test_a_step_that_fails_is_not_blamed_on_the_loaders() -> None:
    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        make_loader("auto", TENSORS, batch_size=5, device="cpu", seed=0, step=step)


def test_a_graph_is_timed_as_it_would_run(train_here: Train, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for the batches of each candidate: floats of `disk`, uint8 of `ram`, indices of `gpu_slice`."""
    inputs: list[list[torch.dtype]] = []
    replay = GraphedStep.replay

    def recorded(self: GraphedStep, batch: tuple[Tensor, ...], keys: Tensor | None) -> dict[str, Tensor]:
        assert [part.dtype for part in batch] == [part.dtype for part in self._inputs]
        inputs.append([part.dtype for part in batch])
        return replay(self, batch, keys)

    monkeypatch.setattr(GraphedStep, "replay", recorded)
    monkeypatch.setattr(setup, "resolve_step_config", lambda *parts: StepConfig(fused=True, cuda_graph=True))
    ended = train_here(*quick, "data/loader=auto", "epochs=1", *BRIEF)
    assert ended.returncode == 0, ended.stderr
    for expected in ([torch.int64], [torch.uint8, torch.int64], [torch.float32, torch.int64]):
        assert expected in inputs
