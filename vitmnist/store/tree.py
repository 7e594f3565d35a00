"""Nested dicts, lists and tuples: their leaves, their structure, and where two of them differ."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """How the leaves of a tree are nested; `LEAF` is a leaf, as is an object of any other type.

    Args:
        kind: dict, OrderedDict, list, tuple or a named tuple.
        keys: of a dict, the fields of a named tuple, or the indices of a list.
        children: the structures of the values.
    """

    kind: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    def paths(self) -> Iterator[str]:
        """The path of each leaf, such as `['image'][0]`."""
        if self.kind is None:
            yield ""
        for key, child in zip(self.keys, self.children, strict=True):
            name = f".{key}" if hasattr(self.kind, "_fields") else f"[{key!r}]"
            yield from (name + path for path in child.paths())


LEAF = Structure()


def flatten(tree: Any, leaf_type: type | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a tree in order, and its structure; objects of `leaf_type` are leaves too."""
    leaves: list[Any] = []

    def structure_of(tree: Any) -> Structure:
        kind = type(tree)
        keys: Iterable[Any]
        if kind in (dict, OrderedDict):
            keys, values = tree, tree.values()
        elif kind in (list, tuple):
            keys, values = range(len(tree)), tree
        elif isinstance(tree, tuple) and hasattr(tree, "_fields") and kind is not leaf_type:
            keys, values = tree._fields, tree
        else:
            leaves.append(tree)
            return LEAF
        return Structure(kind, tuple(keys), tuple(map(structure_of, values)))

    return leaves, structure_of(tree)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The tree of this structure with these leaves."""
    remaining = iter(leaves)

    def build(structure: Structure) -> Any:
        kind = structure.kind
        if kind is None:
            return next(remaining)
        values = list(map(build, structure.children))
        if kind in (list, tuple):
            return kind(values)
        return kind(*values) if hasattr(kind, "_fields") else kind(zip(structure.keys, values, strict=True))

    return build(structure)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    leaves, structure = flatten(tree)
    return list(zip(structure.paths(), leaves, strict=True))


def tree_map(function: Callable[[Any], Any], tree: Any, leaf_type: type | None = None) -> Any:
    """A tree with `function` applied to each leaf, of which objects of `leaf_type` are some."""
    leaves, structure = flatten(tree, leaf_type)
    return unflatten(map(function, leaves), structure)


TRACES = ("_applied_operations", "_pending_operations")
"""Where MONAI notes the transforms of a tensor: with the address of each, which differs from call to call."""
Compared = dict[tuple[int, int], tuple[Any, Any]]
"""Pairs of objects that have been compared, by their numbers."""


def find_difference(actual: Any, expected: Any) -> str | None:
    """Where two batches first differ, in structure, type, dtype, shape or a single bit; None if nowhere."""
    return _find_difference(actual, expected, {})


def stride_order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost, which is its memory format."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def _find_difference(actual: Any, expected: Any, compared: Compared) -> str | None:
    if flatten(actual)[1] != flatten(expected)[1]:
        return "the structure"
    for (path, value), (_, other) in zip(named_leaves(actual), named_leaves(expected), strict=True):
        are_pictures = isinstance(value, Image.Image) and isinstance(other, Image.Image)  # of any file format
        if not (are_pictures or _name(type(value)) == _name(type(other))) or not _is_same(value, other, compared):
            return f"batch{path}"
    return None


def _name(kind: type) -> tuple[str, str]:
    """What identifies a class, even if a function defines it in each call."""
    return kind.__module__, kind.__qualname__


def _is_same(actual: Any, expected: Any, compared: Compared) -> bool:
    """Bitwise equality, so that a NaN equals itself; the memory format counts too, such as channels last."""
    if actual is expected and not isinstance(actual, Tensor | np.ndarray):
        return True
    if isinstance(expected, np.ndarray | np.generic) and not expected.dtype.hasobject:
        return (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(expected, Image.Image):  # without metadata, such as the resolution
        contents = [(image.mode, image.size, image.getpalette(), image.tobytes()) for image in (actual, expected)]
        return contents[0] == contents[1]
    if isinstance(expected, float):
        return struct.pack("d", actual) == struct.pack("d", expected)
    if isinstance(expected, int | str | bytes | set | frozenset):
        return bool(actual == expected)
    if (pair := (id(actual), id(expected))) in compared:  # they refer to themselves
        return True
    compared[pair] = actual, expected  # keeps them, so that no other object gets their number
    if isinstance(expected, Tensor):
        if actual.requires_grad != expected.requires_grad:
            return False
        if expected.is_nested:  # a jagged one gets another symbolic size in each call
            return not _find_difference(list(actual.unbind()), list(expected.unbind()), compared)
    if not isinstance(expected, Tensor) or expected.layout != torch.strided:
        return not _find_difference(_parts(actual), _parts(expected), compared)
    with torch._C.DisableTorchFunctionSubclass():
        formats = [(tensor.shape, tensor.dtype, _memory_format(tensor)) for tensor in (actual, expected)]
        if formats[0] != formats[1]:
            return False
        plain = [
            tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg() for tensor in (actual, expected)
        ]
    bits = [torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()) for tensor in plain]
    are_equal = torch.equal(*(values.view(torch.uint8) for values in bits))
    return are_equal and not _find_difference(_attributes(actual), _attributes(expected), compared)


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """Those of a subclass, such as the format of bounding boxes."""
    attributes = getattr(tensor, "__dict__", {})
    return {name: _without_ids(value) if name in TRACES else value for name, value in attributes.items()}


def _without_ids(trace: Any) -> Any:
    if isinstance(trace, dict):
        return {key: _without_ids(value) for key, value in trace.items() if key != "id"}
    return list(map(_without_ids, trace)) if isinstance(trace, list) else trace


def _memory_format(tensor: Tensor) -> list[int]:
    return [dim for dim in stride_order(tensor) if tensor.shape[dim] > 1]


def _parts(value: Any) -> Any:
    """What an object is made of, as for `pickle`; its name if it cannot be pickled, such as a function."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # any method of an object may fail
        return getattr(value, "__qualname__", None)
    return [list(part) if isinstance(part, Iterator) else part for part in parts] if type(parts) is tuple else parts
