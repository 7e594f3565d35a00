"""What can go wrong around a run ends in one line that says what it was, and loses nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import PLAIN, Start, Train, result_of
from vitmnist.data.datasets.idx import read_idx
from vitmnist.errors import DataError
from vitmnist.training import step

SMALL = ["data.dataset.train_size=40", "data.dataset.test_size=20", "batch_size=20", "epochs=1", "model=cnn", PLAIN]


def test_a_device_that_is_out_of_memory_gives_advice_and_the_sweep_goes_on(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross_entropy = step.F.cross_entropy

    def exhausted(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
        if len(labels) == 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nDetails.")
        return cross_entropy(logits, labels, **options)

    monkeypatch.setattr(step.F, "cross_entropy", exhausted)
    ended = train_here("-m", *SMALL, f"data.root={tmp_path}", "batch_size=20,10", "hydra.sweep.dir=sweep")
    assert ended.returncode == 1
    results = [result_of(folder) for folder in sorted((tmp_path / "sweep").glob("*-*"))]
    assert [result["status"] for result in results] == ["failed", "completed"]
    assert results[0]["error"].startswith(
        "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB.; try a smaller batch_size"
    )
    assert "Traceback" not in ended.stderr


def test_a_model_larger_than_memory_gives_advice(train_here: Train, tmp_path: Path) -> None:
    ended = train_here(*SMALL, "model.width=10000000000", f"data.root={tmp_path}")
    assert ended.returncode == 1
    assert "error: out of memory: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_runs_may_prepare_the_same_data_at_once(start: Start, tmp_path: Path) -> None:
    started = [
        start(*SMALL, f"data.root={tmp_path / 'data'}", f"data/loader={loader}", output=f"{number}.log")
        for number, loader in enumerate(("disk", "cache"))
    ]
    ended = [process.ended() for process in started]
    assert [code for code, _ in ended] == [0, 0], ended
    folders = list((tmp_path / "outputs" / "runs").glob("*/*"))
    assert len(folders) == 2  # also those that began in the same second
    assert len({result_of(folder)["epochs"][0]["train_loss"] for folder in folders}) == 1


HEADERS = st.builds(
    lambda zeros, kind, dimensions, shape: (
        bytes([*zeros, kind, dimensions]) + b"".join(size.to_bytes(4, "big") for size in shape)
    ),
    st.sampled_from([(0, 0), (0, 1), (1, 0)]),
    st.sampled_from([8, 9, 0xB, 0, 255]),
    st.integers(0, 5),
    st.lists(st.sampled_from([0, 1, 2, 28, 2**16, 2**31, 2**32 - 1]), max_size=4),
)


@pytest.mark.parametrize("files", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_files_end_in_clean_errors_and_take_no_memory(tmp_path: Path, files: int) -> None:
    """Also those whose header promises terabytes."""
    contents = st.tuples(st.one_of(HEADERS, st.binary(max_size=20)), st.binary(max_size=100)).map(b"".join)
    limits = settings(max_examples=files, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    limits(given(contents)(lambda content: read_hostile(tmp_path / "hostile", content)))()


def read_hostile(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    tracemalloc.start()
    elements, message = 0, "hostile"
    try:
        elements = read_idx(path).numel()
    except DataError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert elements <= len(content)
    assert "hostile" in message
    assert peak < 10_000_000
