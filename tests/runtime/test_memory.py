"""A dataset that does not fit into memory is refused before it is read; freed memory is reused for the next batch."""

import platform
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from vitmnist import make_loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import TensorSet
from vitmnist.runtime import cpu, memory
from vitmnist.runtime.memory import OutOfSpaceError, check_fits, measure_free_memory, read_host_peak, reset_host_peak

CPU = torch.device("cpu")
SAMPLER = EpochSampler(23, 2, 0)
TENSORS = TensorSet(torch.zeros(23, 3), torch.zeros(23))
MAPPED = TensorSet(TENSORS.images, TENSORS.labels, is_mapped=True)


@pytest.mark.parametrize("name", ["ram", "gpu_slice"])
def test_a_dataset_that_does_not_fit_is_refused_with_advice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: 100)
    with pytest.raises(OutOfSpaceError, match=r"takes 0\.0 MiB .* on the host, .*; try data/loader=.*cache or disk"):
        make_loader(name, MAPPED, batch_size=2, device="cpu", seed=0)
    # A dataset that is in memory already takes no more memory.
    make_loader("ram", TENSORS, batch_size=2, device="cpu", seed=0).close()


def test_gpu_memory_is_checked_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: {"cpu": 2**32, "cuda": 2**30}[device.type])
    check_fits("gpu_slice", 2**30, cuda)
    with pytest.raises(OutOfSpaceError, match=r"takes 1,024\.0 MiB of memory on cuda, .* are free; try another"):
        check_fits("gpu_slice", 2**30 + 1, cuda, "; try another")


@pytest.mark.needs("/proc")
def test_free_and_peak_memory_match_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < measure_free_memory(CPU) < 2**50
    reset_host_peak()
    before = read_host_peak()
    torch.ones(2**25)
    assert 2**26 < read_host_peak() - before < 2**28  # 128 MiB
    monkeypatch.setattr(memory, "Path", lambda name: Path("/nowhere"))  # as on macOS
    reset_host_peak()
    assert 2**26 < read_host_peak() < 2**36


def test_the_limits_of_a_container_are_respected_and_its_memory_is_divided_among_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    monkeypatch.setattr(cpu, "PROCESS_GROUPS", tmp_path / "groups")
    assert measure_free_memory(CPU) > 2**20
    (tmp_path / "groups").write_text("1:cpu,cpuacct:/x\n0::/outer/inner\n")
    for folder in (tmp_path / "outer" / "inner", tmp_path / "outer", tmp_path):  # Any of them may have a limit.
        folder.mkdir(parents=True, exist_ok=True)
        limit = psutil.Process().memory_info().rss + 2**20
        (folder / "memory.max").write_text(f"{limit}\n")
        assert measure_free_memory(CPU) <= 2**20
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # The other rank may not have allocated its half yet.
        assert measure_free_memory(CPU) == 0
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        (folder / "memory.max").write_text("max\n")
        assert measure_free_memory(CPU) > 2**20
    cores = cpu.available_cores()
    for limit, expected in (("max 100000", cores), ("50000 100000", 1), ("99999999 100000", cores)):
        (tmp_path / "outer" / "cpu.max").write_text(f"{limit}\n")
        assert cpu.available_cores() == expected


def test_each_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    for name, sizes in {"memory_reserved": (50, 8), "memory_allocated": (30, 5)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, sizes=sizes: sizes[device.index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((100, 1000)[device.index], 2000))
    assert [measure_free_memory(device) for device in (first, second)] == [120, 1003]
    images = Mock(spec=torch.Tensor, device=first, nbytes=7, shape=(1,), __len__=lambda _: 1)
    on_first = TensorSet(images, torch.zeros(1))
    assert on_first.nbytes_to_copy(first) == 0
    assert on_first.nbytes_to_copy(second) == on_first.nbytes_to_copy(CPU) == on_first.nbytes > 0


PAGE_FAULTS = """
import resource
import torch
from vitmnist import make_loader

images, labels = torch.zeros(9, 1, 4, 4, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64)
make_loader("ram", (images, labels), batch_size=3, device="cpu", seed=0)
for index in range(40):
    if index == 30:  # the first ones find no free block of their size and alignment
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_large_blocks_are_reused() -> None:
    ended = subprocess.run([sys.executable, "-c", PAGE_FAULTS], check=True, capture_output=True)
    assert int(ended.stdout) < 1000
