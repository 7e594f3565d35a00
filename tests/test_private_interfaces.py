"""The private names of other packages that vitmnist uses.

Versions of torch have no upper bound, so a new one may lack any of it. Each row says what the user would see then.
"""

import ast
import pkgutil
import re
from collections.abc import Iterator

from tests.support.processes import REPOSITORY

FILES = [file for folder in ("vitmnist", "hydra_plugins") for file in (REPOSITORY / folder).rglob("*.py")]
PRIVATE = {  # (owner, names): what the user sees without them
    # Tells Hydra's options from overrides.
    ("hydra._internal.utils", "get_args_parser"): "train refuses to start; other commands work",
    ("hydra._internal.core_plugins.basic_sweeper", "BasicSweeper"): "sweeps with `repeats` and searches are refused",
    # One kernel for all averaged weights; torch's own optimizers use them.
    ("torch", "_foreach_add_ _foreach_copy_ _foreach_mul_ _foreach_sub"): "ema_decay ends at its first step",
    # torch documents `torch._C.DisableTorchFunctionSubclass`: the values of a tensor of any subclass.
    ("torch", "_C"): "from_dataloader refuses samples of other kinds of tensors",
    # Batches of PIL images and None, which torch's `default_collate` refuses.
    ("torch.utils.data._utils.collate", "collate default_collate_fn_map"): "datasets read sample by sample end",
}
# Documented in spite of their underscore: os._exit, fields and replacement of named tuples, Hydra's key _target_, and
# the type of dataclasses in typeshed.
DOCUMENTED = {"_exit", "_fields", "_replace", "_target_", "_typeshed.DataclassInstance"}


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
    private = read - {name for tree in trees for name in names_defined(tree)}
    full = [f"{owner}.{name}" for owner, names in PRIVATE for name in names.split()]
    assert private == {name if "._" in name.rpartition(".")[0] else name.rpartition(".")[2] for name in full}
    assert len(full) <= 12
    for name in full:
        pkgutil.resolve_name(name)
