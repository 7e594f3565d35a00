"""What vitmnist uses of other packages without their promise: private names, and messages recognised by their words.

Versions of torch have no upper bound, so a new one may lack any of it. Each row says what the user would see then.
"""

from __future__ import annotations

import ast
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.conftest import REPOSITORY
from vitmnist.data.huggingface import RowPairs
from vitmnist.diagnosis import script
from vitmnist.runtime.failures import classify
from vitmnist.tracking.environment import LIBRARIES

SENTENCE = "error: …: this version of PACKAGE is not supported; type pip install --upgrade vitmnist, or install an …"


class Private(NamedTuple):
    """Private names: of what, where they are used, and what breaks and is seen without them."""

    owner: str
    names: str
    used_in: str
    without: str


PRIVATE = [
    # Tells Hydra's options from overrides.
    Private("hydra._internal.utils", "get_args_parser", "cli/messages.py cli/overrides.py", SENTENCE),
    Private(
        "hydra._internal.core_plugins.basic_sweeper",
        "BasicSweeper",
        "hydra_plugins/vitmnist_rounds.py",
        "Hydra warns that the plugin is incompatible, and a sweep with `repeats` is refused; all else works",
    ),
    # One kernel for all averaged weights; torch's own optimizers use them.
    Private(
        "torch",
        "_foreach_add_ _foreach_mul_ _foreach_sub",
        "optim/ema.py",
        "a run with ema_decay ends at its first step, with the name that is missing; all else works",
    ),
    # The tensors of nested samples and batches.
    Private(
        "torch.utils._pytree",
        "TreeSpec keystr tree_flatten tree_flatten_with_path tree_leaves tree_structure tree_unflatten",
        "data/batch_tensors.py data/keep_samples.py data/samples.py data/tensor_transforms.py data/transforms.py "
        "diagnosis/audit_promises.py diagnosis/audit_subject.py diagnosis/measure.py",
        SENTENCE,
    ),
    # Batches of PIL images and None, which torch's `default_collate` refuses.
    Private("torch.utils.data._utils.collate", "collate default_collate_fn_map", "data/collate.py", SENTENCE),
    Private(
        *("datasets.Dataset", "_fingerprint", "data/gathering.py data/huggingface.py"),
        "its cache has no name, so that each process decodes a Hugging Face dataset again",
    ),
    Private(
        *("threading", "_shutdown", "diagnosis/script.py"),
        "the report of `diagnose` comes before the threads of the script have ended",
    ),
]
# Documented in spite of their underscore: os._exit, namedtuple._fields and Hydra's key _target_.
DOCUMENTED = {"_exit", "_fields", "_target_"}


class Words(NamedTuple):
    """Words of a message, or names in a traceback: where they are recognised, what the user sees without, and how to
    provoke the real ones (None: needs a GPU, or a full /dev/shm as in tests/runtime/test_failures.py)."""

    words: str
    used_in: str
    without: str
    provoke: Callable[[], str] | None


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
    return said(lambda: list(DataLoader(Acting(act), num_workers=1, timeout=2)))


def crowd() -> None:
    DataLoader(Acting(fail), num_workers=10_000)


TRACEBACK = "the library's own message with a traceback"
FAILURES, LOADER = "runtime/failures.py", "data/loaders/disk.py"
OTHER_ADVICE = "the advice for a GPU or a worker that failed"
MESSAGES = [
    Words("DataLoader timed out", f"{FAILURES} {LOADER}", TRACEBACK, lambda: of_worker(sleep)),
    Words("DataLoader worker (pid", FAILURES, TRACEBACK, lambda: of_worker(kill)),
    Words("Caught ", LOADER, "no change: `worker_error` does not know it", lambda: of_worker(fail)),
    Words("This DataLoader will create", LOADER, "torch's warning of more workers than cores", lambda: said(crowd)),
    Words("can't allocate memory", FAILURES, TRACEBACK, lambda: said(lambda: torch.empty(2**50))),
    Words("CUDA error: out of memory", FAILURES, OTHER_ADVICE, None),
    Words("CUBLAS_STATUS_ALLOC_FAILED", FAILURES, OTHER_ADVICE, None),
    Words("CUDA error", FAILURES, TRACEBACK, None),
    Words("</torch_", FAILURES, TRACEBACK, None),
    Words("out of shared memory", FAILURES, OTHER_ADVICE, None),
    Words("insufficient shared memory", FAILURES, TRACEBACK, None),
    Words("items of ancdata", FAILURES, TRACEBACK, None),
    Words(
        *("FailOnRecompileLimitHit", "training/compilation.py", "the step is not compiled, and the log says why"),
        lambda: str(pydoc.locate("torch._dynamo.exc.FailOnRecompileLimitHit")),
    ),
    Words(
        *("_inductor", "diagnosis/observer.py", "`diagnose` counts torch's compiling processes as the script's"),
        lambda: str(find_spec("torch._inductor.compile_worker.__main__")),
    ),
]


def sleep() -> None:
    time.sleep(60)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError


def private_names(file: Path) -> Iterator[str]:
    """Names with an underscore that a file imports, or reads of another object, and that vitmnist does not define."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        yield from (name for name in names if re.search(r"(^|\.)_(?!_)", name) and name not in DOCUMENTED)


def path_of(file: str) -> Path:
    return REPOSITORY / ("" if file.startswith("hydra_plugins") else "vitmnist") / file


def test_the_table_has_every_private_name() -> None:
    files = [file for folder in ("vitmnist", "hydra_plugins") for file in (REPOSITORY / folder).rglob("*.py")]
    own = set(re.findall(r"\bdef (_\w+)|\b(?:self|cls)\.(_\w+)", "".join(map(Path.read_text, files))))
    own = {name for pair in own for name in pair} - {"_fingerprint"}  # of an image folder; that of `datasets` is not
    found = {(file, name) for file in files for name in private_names(file) if name not in own}
    used = {(path_of(file), row) for row in PRIVATE for file in row.used_in.split()}
    listed = {
        f"{row.owner}.{name}" if "._" in row.owner else name: row for row in PRIVATE for name in row.names.split()
    }
    assert {name for _, name in found} == set(listed)
    assert {(file, listed[name]) for file, name in found} == used


def test_each_private_name_exists() -> None:
    for row in PRIVATE:
        if row.owner != "datasets.Dataset":  # an attribute of its objects: see the next test
            assert {*row.names.split()} <= {*vars(import_module(row.owner))}


def test_a_hugging_face_dataset_has_a_fingerprint() -> None:
    assert datasets.Dataset.from_dict({})._fingerprint


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row.words)
def test_messages_still_have_the_words_that_are_looked_for(row: Words) -> None:
    for file in row.used_in.split():
        assert row.words in path_of(file).read_text()
    if row.provoke:
        assert row.words in row.provoke()


def test_the_libraries_of_torch_are_recognised() -> None:
    """Without, a record does not say which BLAS torch was built with."""
    assert LIBRARIES.search(torch.__config__.show() + torch.__config__.parallel_info())


# What happens without them.


def test_a_missing_interface_is_one_sentence(tmp_path: Path) -> None:
    program = (
        "import hydra._internal.utils as utils, sys; del utils.get_args_parser; sys.argv = ['vitmnist', 'epochs=1'];"
        "from vitmnist.__main__ import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 1
    assert re.fullmatch(r"error: cannot import name 'get_args_parser' .* older hydra\n", ended.stderr), ended.stderr
    with pytest.raises(ImportError) as raised:  # as by an import during the run
        exec("from torch.utils._pytree import no_longer_there")
    assert "this version of torch is not supported; type pip install" in classify(raised.value).message
    assert classify(raised.value).is_user_error
    with pytest.raises(ImportError) as raised:  # of a script of the user
        exec("import no_such_module")
    assert not classify(raised.value).is_user_error


def test_without_a_fingerprint_rows_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"image": [[[0.0]]], "label": [0]})
    assert RowPairs(rows).fingerprint
    monkeypatch.setattr(rows, "with_format", lambda *_, **__: rows)  # needs the fingerprint itself
    monkeypatch.delattr(rows, "_fingerprint")
    assert RowPairs(rows).fingerprint is None


def test_a_script_ends_without_waiting_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(threading, "_shutdown")
    script._join_threads()
