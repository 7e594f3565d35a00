"""An automatic choice is measured with the step that will train, explained, recorded, and changes nothing but time."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import BRIEF, AddMembers, Printed, assert_same_run, result_of
from tests.support.samples import Made
from vitmnist import make_loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.errors import ConfigError, DataError
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, select_loader
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.loaders.decoded import RamLoader
from vitmnist.models import MODELS
from vitmnist.models.cnn import CNN, CNNOptions
from vitmnist.registry import Member, NoOptions
from vitmnist.runtime import memory
from vitmnist.store.rows import StoreOptions
from vitmnist.timing.benchmark import LoaderCandidate, Measurement

CPU = torch.device("cpu")
SAMPLER = EpochSampler(23, 2, 0)
TENSORS = TensorSet(torch.zeros(23, 3), torch.zeros(23))
MAPPED = TensorSet(TENSORS.images, TENSORS.labels, is_mapped=True)


class DirectLoader(Loader):
    """Reads each batch from the source that it is built from."""

    def __init__(self, options: NoOptions, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.source = source

    def batches(self, epoch: int, start: int) -> Batches:
        yield from map(self.source.read, self.sampler.batch_indices(epoch, start))


@pytest.fixture
def registered(add_members: AddMembers) -> None:
    """The loaders `slow`, which takes 30 ms a batch, and `broken`."""

    class Slow(DirectLoader):
        def batches(self, epoch: int, start: int) -> Batches:
            for batch in super().batches(epoch, start):
                time.sleep(0.03)
                yield batch

    class Broken(DirectLoader):
        def __init__(self, *parts: object) -> None:
            raise DataError("its disk is gone")

    add_members(LOADERS, slow=Member(NoOptions, Slow), broken=Member(NoOptions, Broken))


def chosen(*names: str, data: TensorSet = TENSORS, **options: object) -> LoaderSelection:
    return select_loader(
        AutoOptions(candidates=list(names), **{"batches": 5, **options}), data, SAMPLER, CPU, LoaderCandidate
    )[0]


@pytest.mark.usefixtures("registered")
def test_the_fastest_is_chosen_and_the_table_says_why() -> None:
    selection = chosen("slow", "broken", "ram")
    assert selection.name == "ram"
    fast, slow, broken = asdict(selection)["candidates"]
    assert slow["epoch_s"]["high"] >= slow["epoch_s"]["median"] >= slow["epoch_s"]["low"] > 12 * 0.03
    assert slow["epoch_s"]["low"] > fast["epoch_s"]["low"] > 0
    assert (broken["name"], broken["error"], broken["epoch_s"]) == ("broken", "its disk is gone", None)
    table = selection.format_table()
    assert re.search(r"^slow +0\.\d+ s +[\d.e-]+ s$", table, re.MULTILINE), "without a model, nothing waits"
    assert re.search(r"^broken +its disk is gone$", table, re.MULTILINE)
    assert re.search(r"chosen: ram, [\d.e-]+ s an epoch expected, the least$", table)
    with pytest.raises(ConfigError, match="no candidate can be used:\nbroken: its disk is gone"):
        chosen("broken")
    with pytest.raises(ConfigError, match=r"data\.loader\.candidates=brokn: not known; .*broken"):
        chosen("brokn")


@pytest.mark.usefixtures("registered")
def test_the_time_limit_ends_the_timing_after_a_block() -> None:
    (timing,) = chosen("slow", seconds=0.01).candidates
    assert timing.epoch_s.n == 1


def test_a_file_is_not_written_if_memory_holds_the_samples(add_members: AddMembers) -> None:
    """Any other registered loader is a candidate."""
    add_members(LOADERS, own=Member(NoOptions, DirectLoader))
    selection, _ = select_loader(AutoOptions(batches=5), TENSORS, SAMPLER, CPU, LoaderCandidate)
    assert {timing.name for timing in selection.candidates} == {*LOADERS.members()} - {"auto", "cache"}


@pytest.mark.parametrize("names", [("ram", "own", "prefetch", "gpu_slice"), ("own", "prefetch", "gpu_slice")])
def test_a_mapped_dataset_is_read_once_for_all_candidates_in_memory(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, add_members: AddMembers
) -> None:
    """`prefetch`, which wraps `ram`, needs no second copy next to the first one."""
    add_members(LOADERS, own=Member(NoOptions, type("Own", (RamLoader,), {"takes_decoded": True})))
    copies = []
    store_all = TensorSet.store_all

    def counted(data: TensorSet, options: StoreOptions) -> TensorSet:
        copies.extend([options] if data.is_mapped else [])
        # The memory suffices for one copy, and after it none is left.
        monkeypatch.setattr(memory, "measure_free_memory", lambda device: MAPPED.nbytes - 1)
        return store_all(data, options)

    monkeypatch.setattr(TensorSet, "store_all", counted)
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: MAPPED.nbytes)
    assert not any(timing.error for timing in chosen(*names, data=MAPPED).candidates)
    assert len(copies) == 1


class RunningMean(torch.nn.Module):
    """Subtracts a running mean of the images, which `state_dict()` does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * images.mean()
        return images - self.mean


def test_a_run_with_auto_learns_the_same_weights(
    succeed: Printed, quick: list[str], tmp_path: Path, add_members: AddMembers
) -> None:
    """The candidates are timed with the run's own step, and leave its model, average and schedule alone."""
    add_members(MODELS, cnn=Member(CNNOptions, lambda *parts: torch.nn.Sequential(RunningMean(), CNN(*parts))))
    step = ["trainer=fast", "trainer.micro_batch=4", "trainer.precision=fp32", "ema_decay=0.9", "schedule=one_cycle"]
    automatic = ["data/loader=auto", *BRIEF]
    printed = succeed(*quick, *step, *automatic, "hydra.run.dir=automatic")
    found = result_of(tmp_path / "automatic")
    assert {"gpu_slice", "ram", "prefetch", "disk"} <= {timing["name"] for timing in found["auto"]["candidates"]}
    assert all(timing["epoch_s"]["low"] > 0 and timing["error"] is None for timing in found["auto"]["candidates"])
    assert found["auto"]["name"] != "auto"
    assert f"chosen: {found['auto']['name']}, {found['auto']['reason']}" in printed
    succeed(*quick, *step, "data/loader=ram", "hydra.run.dir=by_hand")
    assert_same_run(tmp_path / "automatic", tmp_path / "by_hand")


def test_a_step_of_the_user_is_timed_with_each_loader(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    calls: list[int] = []
    names: list[str] = []

    def step(batch: list[Tensor]) -> None:
        calls.append(len(batch[1]))
        model(batch[0]).sum().backward()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with make_loader("auto", TENSORS, batch_size=5, device="cpu", seed=0, candidates=["ram"], step=step):
        pass
    assert set(calls) == {5, 3}
    assert torch.equal(before, torch.get_rng_state()), "how much a step draws depends on the time that it takes"
    assert re.search(r"^ram +\d+% +[\d.]+ s +[\d.e-]+ s$", capsys.readouterr().err, re.MULTILINE)

    samples = Made(lambda index: {"image": torch.zeros(3), "name": str(index)}, 20)
    with make_loader(
        "auto", samples, batch_size=5, device="cpu", seed=0, step=lambda batch: names.extend(batch["name"])
    ):
        assert "19" in names

    def fails(batch: list[Tensor]) -> None:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ConfigError, match=r"no candidate can be used:\n.*ZeroDivisionError: of the user"):
        make_loader("auto", TENSORS, batch_size=5, device="cpu", seed=0, step=fails)


def test_a_step_is_compiled_before_it_is_timed_and_not_within_an_epoch(
    succeed: Printed, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is compiled for the batches of each candidate: `disk` delivers floats, the others uint8."""
    compiled, compiled_in_window = [], []
    time_window = Measurement.time_window

    def timed(measurement: Measurement, *parts: object) -> None:
        before = len(compiled)
        time_window(measurement, *parts)
        compiled_in_window.append(len(compiled) - before)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        compiled.append({tensor.dtype for tensor in inputs})
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(Measurement, "time_window", timed)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    typed = ["data/loader=auto", "data.loader.candidates=[disk,ram,gpu_slice]", "trainer.compile=true", "epochs=1"]
    succeed(*quick, *typed, "hydra.run.dir=here", *BRIEF)
    assert result_of(tmp_path / "here")["compile_s"] > 0
    assert [torch.uint8 in dtypes for dtypes in compiled] == [True, False]
    assert set(compiled_in_window) == {0}
