"""Where several processes train one model, `make_loader` gives each its part of every batch, or an error."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.pages import blocks, write_block
from tests.support.processes import REPOSITORY, call_in_process, run_python
from vitmnist import make_loader
from vitmnist.errors import ConfigError

PAIR = torch.arange(23 * 3).view(23, 3), torch.arange(23)
ORDER = {"batch_size": 5, "device": "cpu", "seed": 0}


def labels(name: str = "ram", **options: object) -> list[list[int]]:
    with make_loader(name, PAIR, **ORDER, **options) as loader:
        return [batch.tolist() for _, batch in loader.epoch(1)]


@pytest.mark.parametrize("name", ["ram", "gpu_slice", "prefetch", "cache", "disk"])
def test_ranks_share_the_batches_of_a_single_process(name: str, tmp_path: Path) -> None:
    options = {"cache": {"folder": str(tmp_path)}, "disk": {"num_workers": 0}}.get(name, {})
    parts = [labels(name, rank=rank, world_size=2, **options) for rank in range(2)]
    assert [first + second for first, second in zip(*parts, strict=True)] == labels()


def test_the_ranks_of_torch_distributed_are_the_default(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=rank, world_size=2)
        (tmp_path / str(rank)).write_text(repr(labels()))
        torch.distributed.barrier()

    processes = [call_in_process(lambda rank=rank: run(rank)) for rank in range(2)]
    for process in processes:
        process.join(60)
    assert [eval((tmp_path / str(rank)).read_text()) for rank in range(2)] == [
        labels(rank=rank, world_size=2) for rank in range(2)
    ]


def test_a_process_of_torchrun_that_is_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .*init_process_group.*, or give rank= and world_size="):
        labels()
    labels(rank=0, world_size=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 1}, "belong together; give both"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be at least 0 and below world_size=2"),
        ({"rank": 0, "world_size": 6}, "batch_size=5: 6 processes train together"),
    ],
)
def test_impossible_ranks_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        labels(**given)


@pytest.mark.slow  # each rank imports torch
def test_the_documented_loop_trains_under_torchrun(tmp_path: Path) -> None:
    (script,) = (block for block in blocks("python", REPOSITORY / "docs" / "loaders.md") if "# ddp.py" in block)
    write_block(tmp_path, script)
    ended = run_python("-m", "torch.distributed.run", "--nproc-per-node=2", "ddp.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"rank (\d): 250 images per batch, loss (0\.\d+)", ended.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
