"""What vitmnist uses of other packages without their promise: private names, and messages recognised by their words.

Versions of torch have no upper bound, so a new one may lack any of it. Each row says what the user would see then.
"""

from __future__ import annotations

import ast
import os
import pydoc
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hydra_plugins.vitmnist_sweepers  # noqa: F401  # imports what pydoc looks up
from tests.conftest import REPOSITORY
from vitmnist.config.compose import compose
from vitmnist.tracking.environment import LIBRARIES

FILES = [file for folder in ("vitmnist", "hydra_plugins") for file in (REPOSITORY / folder).rglob("*.py")]
NOTHING = "the program does not start: an ImportError names it"
PRIVATE = {  # of what, names: what the user sees without them
    # Tells Hydra's options from overrides.
    ("hydra._internal.utils", "get_args_parser"): NOTHING,
    (
        "hydra._internal.core_plugins.basic_sweeper",
        "BasicSweeper",
    ): "sweeps with `repeats` and searches are refused",
    # One kernel for all averaged weights; torch's own optimizers use them.
    ("torch", "_foreach_add_ _foreach_mul_ _foreach_sub"): "ema_decay ends at its first step; all else works",
    # torch documents `torch._C.DisableTorchFunctionSubclass`: the values of a tensor of any subclass.
    ("torch", "_C"): "from_dataloader refuses samples of other kinds of tensors",
    # Batches of PIL images and None, which torch's `default_collate` refuses.
    (
        "torch.utils.data._utils.collate",
        "collate default_collate_fn_map",
    ): "datasets read sample by sample end",
    ("datasets.Dataset", "_fingerprint"): "each process decodes a Hugging Face dataset again",
}
# Documented in spite of their underscore: os._exit, namedtuple._fields and Hydra's key _target_.
DOCUMENTED = {"_exit", "_fields", "_target_"}


class Acting(Dataset[int]):
    """Does something to the worker that reads it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.act()
        return index


def raised_by(action: Callable[[], Any]) -> Exception:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def said(action: Callable[[], Any]) -> str:
    return str(raised_by(action))


def of_worker(act: Callable[[], Any]) -> str:
    return said(lambda: list(DataLoader(Acting(act), num_workers=1, timeout=1)))


def crowd() -> None:
    DataLoader(Acting(fail), num_workers=10_000)


TRACEBACK = "the library's own message with a traceback"
OTHER_ADVICE = "the advice for a GPU or a worker that failed"
# Words of a message, or names in a traceback: what the user sees without, and how to provoke the real ones (None: needs
# a GPU, or a full /dev/shm as in tests/test_errors.py).
MESSAGES: dict[str, tuple[str, Callable[[], str] | None]] = {
    "DataLoader timed out": (TRACEBACK, lambda: of_worker(sleep)),
    "DataLoader worker (pid": (TRACEBACK, lambda: of_worker(kill)),
    "Caught ": ("no change: `worker_error` does not know it", lambda: of_worker(fail)),
    "This DataLoader will create": ("torch's warning of more workers than cores", lambda: said(crowd)),
    "can't allocate memory": (TRACEBACK, lambda: said(lambda: torch.empty(2**50))),
    "CUDA error: out of memory": (OTHER_ADVICE, None),
    "CUBLAS_STATUS_ALLOC_FAILED": (OTHER_ADVICE, None),
    "CUDA error": (TRACEBACK, None),
    "does not have a deterministic implementation": (TRACEBACK, lambda: said(put)),
    "</torch_": (TRACEBACK, None),
    "out of shared memory": (OTHER_ADVICE, None),
    "insufficient shared memory": (TRACEBACK, None),
    "items of ancdata": (TRACEBACK, None),
    "Could not override 'data'": ("data=NAME is not answered with data/dataset=NAME", lambda: said(compose_data)),
}


def compose_data() -> None:
    compose(["data=mnist"])


def sleep() -> None:
    time.sleep(60)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def put() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


def fail() -> None:
    raise ZeroDivisionError


def is_private(name: str) -> bool:
    return re.search(r"(^|\.)_(?!_)", name) is not None and name not in DOCUMENTED


def names_read(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a file imports or reads, also of its own base classes and of `self`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        yield from filter(is_private, names)


def names_defined(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a file defines or sets: functions, attributes, and those given as keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Call):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def test_the_table_has_every_private_name_and_each_exists() -> None:
    trees = [ast.parse(file.read_text()) for file in FILES]
    read = {name for tree in trees for name in names_read(tree)}
    found = read - {name for tree in trees for name in names_defined(tree)}
    full = [f"{owner}.{name}" for owner, names in PRIVATE for name in names.split()]
    assert found == {name if "._" in name.rpartition(".")[0] else name.rpartition(".")[2] for name in full}
    assert len(full) <= 12
    assert [name for name in full if pydoc.locate(name) is None] == ["datasets.Dataset._fingerprint"]
    assert datasets.Dataset.from_dict({})._fingerprint


@pytest.mark.parametrize("words", MESSAGES)
def test_messages_still_have_the_words_that_are_looked_for(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # what torch waits for a worker's end
    assert any(words in file.read_text() for file in FILES)
    _, provoke = MESSAGES[words]
    assert not provoke or words in provoke()


def test_the_libraries_of_torch_are_recognised() -> None:
    """Without, a record does not say which BLAS torch was built with."""
    assert LIBRARIES.search(torch.__config__.show() + torch.__config__.parallel_info())
