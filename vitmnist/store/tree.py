"""Nested dicts, lists and tuples: their leaves, their structure, and where two of them differ."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Structure:
    """How the leaves of a tree are nested: the tree with None in their places, compared by its `repr`."""

    text: str
    tree: object = field(compare=False, repr=False)

    def paths(self) -> Iterator[str]:
        """The path of each leaf in order, such as `['image'][0]`."""
        return _paths(self.tree)


def tree_map(function: Callable[[Any], object], tree: Any, leaf_type: type | None = None) -> Any:
    """A tree with `function` applied to each leaf in order; objects of `leaf_type` are leaves too.

    The nodes are dicts, OrderedDicts, lists, tuples and named tuples; an object of any other type is a leaf.
    """
    kind, of_value = type(tree), partial(tree_map, function, leaf_type=leaf_type)
    if kind in (dict, OrderedDict):
        return kind((key, of_value(value)) for key, value in tree.items())
    if kind in (list, tuple):
        return kind(map(of_value, tree))
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and kind is not leaf_type:
        return kind(*map(of_value, tree))
    return function(tree)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` applied to each tensor, in mappings and lists of any type too; anything else is kept."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping | list):
            mapped: Any = copy(leaf)  # A copy keeps the type, as torch's pin_memory does.
            for key, value in leaf.items() if isinstance(leaf, Mapping) else enumerate(leaf):
                mapped[key] = map_tensors(function, value)
            return mapped
        return type(leaf)(map(partial(map_tensors, function), leaf)) if isinstance(leaf, tuple) else leaf

    return tree_map(of_leaf, batch)


def copied(tree: Tree) -> Tree:
    """Copies for a function that may change them: new dicts, lists and tuples with copies of what they contain."""

    def copy_of(value: object) -> object:
        if isinstance(value, Tensor):
            # Not deepcopy, which copies the whole storage of a view.
            return value if value.requires_grad else value.clone()
        try:
            return copy(value)
        except Exception:  # Any method of an object may fail.
            return value

    copies: Tree = tree_map(copy_of, tree)
    return copies


def flatten(tree: object) -> tuple[list[Any], Structure]:
    """The leaves of a tree in order, and its structure."""
    leaves: list[Any] = []
    emptied = tree_map(leaves.append, tree)
    return leaves, Structure(repr(emptied), emptied)


def unflatten(leaves: Iterable[object], structure: Structure) -> Any:
    """The tree of this structure with these leaves."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), structure.tree)


def _paths(tree: Any) -> Iterator[str]:
    if tree is None:
        yield ""
        return
    keys = tree if isinstance(tree, dict) else getattr(tree, "_fields", range(len(tree)))
    for key, value in zip(keys, tree.values() if isinstance(tree, dict) else tree, strict=True):
        name = f".{key}" if hasattr(tree, "_fields") else f"[{key!r}]"
        yield from (name + path for path in _paths(value))


TRACES = ("_applied_operations", "_pending_operations")
"""Where MONAI notes the transforms of a tensor: with the address of each, which differs from call to call."""
Compared = dict[tuple[int, int], tuple[object, object]]
"""Pairs of objects that have been compared, by their numbers."""


def find_difference(actual: object, expected: object) -> str | None:
    """Where two batches first differ, in structure, type, dtype, shape or a single bit; None if nowhere."""
    return _find_difference(actual, expected, {})


def stride_order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost, which is its memory format."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def _find_difference(actual: object, expected: object, compared: Compared) -> str | None:
    (values, structure), (others, other_structure) = flatten(actual), flatten(expected)
    if structure != other_structure:
        return "the structure"
    for path, value, other in zip(structure.paths(), values, others, strict=True):
        # The file format does not count.
        are_pictures = isinstance(value, Image.Image) and isinstance(other, Image.Image)
        if not (are_pictures or _name(type(value)) == _name(type(other))) or not _is_same(value, other, compared):
            return f"batch{path}"
    return None


def _name(kind: type) -> tuple[str, str]:
    """What identifies a class, even if a function defines it in each call."""
    return kind.__module__, kind.__qualname__


def _is_same(actual: Any, expected: object, compared: Compared) -> bool:
    """Bitwise equality, so that a NaN equals itself; the memory format counts too, such as channels last."""
    if actual is expected and not isinstance(actual, Tensor | np.ndarray):
        return True
    if isinstance(expected, np.ndarray | np.generic) and not expected.dtype.hasobject:
        return (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(expected, Image.Image):  # Metadata, such as the resolution, do not count.
        contents = [(image.mode, image.size, image.getpalette(), image.tobytes()) for image in (actual, expected)]
        return contents[0] == contents[1]
    if isinstance(expected, float):
        return struct.pack("d", actual) == struct.pack("d", expected)
    if isinstance(expected, int | str | bytes | set | frozenset):
        return bool(actual == expected)
    if (pair := (id(actual), id(expected))) in compared:  # The objects refer to themselves.
        return True
    compared[pair] = actual, expected  # The entry keeps both, so that no other object gets their number.
    if isinstance(expected, Tensor) and expected.is_nested:  # A jagged tensor gets another symbolic size in each call.
        return not _find_difference(list(actual.unbind()), list(expected.unbind()), compared)
    if isinstance(expected, Tensor) and expected.layout == actual.layout == torch.strided:
        is_equal = _tensor_content(actual) == _tensor_content(expected)
        return is_equal and not _find_difference(_attributes(actual), _attributes(expected), compared)
    return not _find_difference(_parts(actual), _parts(expected), compared)


def _tensor_content(tensor: Tensor) -> tuple[object, ...]:
    """Everything that a strided tensor is, without the attributes of a subclass."""
    is_plain = type(tensor) is Tensor
    with nullcontext() if is_plain else torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
        values = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.flatten()).view(torch.uint8)
        memory_format = [dim for dim in stride_order(tensor) if tensor.shape[dim] > 1]
        return tensor.requires_grad, tensor.dtype, tensor.shape, memory_format, values.numpy().tobytes()


def _attributes(tensor: Tensor) -> dict[str, object]:
    """The attributes of a subclass, such as the format of bounding boxes."""
    attributes = getattr(tensor, "__dict__", {})
    return {name: _without_ids(value) if name in TRACES else value for name, value in attributes.items()}


def _without_ids(trace: object) -> object:
    if isinstance(trace, dict):
        return {key: _without_ids(value) for key, value in trace.items() if key != "id"}
    return list(map(_without_ids, trace)) if isinstance(trace, list) else trace


def _parts(value: object) -> object:
    """What an object is made of, as for `pickle`; its name if it cannot be pickled, such as a function."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # Any method of an object may fail.
        return getattr(value, "__qualname__", None)
    return [list(part) if isinstance(part, Iterator) else part for part in parts] if type(parts) is tuple else parts
