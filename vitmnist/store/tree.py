"""Maps, flattens, copies and compares trees of nested dicts, lists and tuples."""

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Tree = TypeVar("Tree")


def map_leaves(function: Callable[[Any], object], tree: Any) -> Any:
    """Apply a function to each leaf of a tree in order.

    The nodes are dicts, OrderedDicts, lists, tuples and named tuples; an object of any other type is a leaf.
    """
    node_type, map_child = type(tree), partial(map_leaves, function)
    if node_type in (dict, OrderedDict):
        return node_type((key, map_child(child)) for key, child in tree.items())
    if node_type in (list, tuple):
        return node_type(map(map_child, tree))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return node_type(*map(map_child, tree))
    return function(tree)


def map_batch_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to each tensor of a batch, in mappings, lists and tuples of any type; keep other objects."""
    map_child = partial(map_batch_tensors, function)
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple):
        return type(batch)(*map(map_child, batch)) if hasattr(batch, "_fields") else type(batch)(map(map_child, batch))
    if not isinstance(batch, Mapping | list):
        return batch
    mapped: Any = copy(batch)  # A copy keeps the type, as torch's pin_memory does.
    for key, child in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        mapped[key] = map_child(child)
    return mapped


def copy_tree(tree: Tree) -> Tree:
    """Copy the nodes and leaves of a tree, so that a function can modify them."""

    def copy_leaf(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            # `deepcopy` would copy the whole storage of a view.
            return leaf if leaf.requires_grad else leaf.clone()
        return copy(leaf)

    copies: Tree = map_leaves(copy_leaf, tree)
    return copies


def flatten_tree(tree: object) -> tuple[list[Any], object]:
    """Return the leaves of a tree in order, and its structure: the same nesting with None for every leaf."""
    leaves: list[Any] = []
    return leaves, map_leaves(leaves.append, tree)  # `append` returns None.


def unflatten_tree(leaves: Iterable[object], structure: object) -> Any:
    """Build a tree from its leaves and its structure."""
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), structure)


def replace_leaves(tree: object, replacements: Iterable[tuple[int, object]]) -> Any:
    """Replace leaves of a tree, each given by its position in the order of `flatten_tree`."""
    leaves, structure = flatten_tree(tree)
    for position, leaf in replacements:
        leaves[position] = leaf
    return unflatten_tree(leaves, structure)


def iterate_paths(tree: Any) -> Iterator[str]:
    """Yield the path of each leaf of a structure in order, such as `['image'][0]`."""
    if tree is None:
        yield ""
        return
    keys = tree if isinstance(tree, dict) else getattr(tree, "_fields", range(len(tree)))
    children = tree.values() if isinstance(tree, dict) else tree
    for key, child in zip(keys, children, strict=True):
        name = f".{key}" if hasattr(tree, "_fields") else f"[{key!r}]"
        yield from (name + path for path in iterate_paths(child))


MONAI_TRACES = ("_applied_operations", "_pending_operations")
"""The attributes in which MONAI records the transforms of a tensor, each with its `id`."""
Compared = dict[tuple[int, int], tuple[object, object]]
"""Pairs of objects whose comparison has begun, by the `id` of both."""


def find_difference(actual: object, expected: object, *, compared: Compared | None = None) -> str | None:
    """Return the path of the first difference in structure, type, dtype, shape or bits; None if the batches are equal.

    Args:
        compared: pairs whose comparison has begun. Objects can contain themselves.
    """
    compared = {} if compared is None else compared
    leaves, structure = flatten_tree(actual)
    expected_leaves, expected_structure = flatten_tree(expected)
    if repr(structure) != repr(expected_structure):  # A dict would equal an OrderedDict.
        return "the structure"
    for path, leaf, expected_leaf in zip(iterate_paths(structure), leaves, expected_leaves, strict=True):
        if not (_have_same_type(leaf, expected_leaf) and _is_equal(leaf, expected_leaf, compared)):
            return f"batch{path}"
    return None


def sort_dims_by_stride(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the outermost in memory to the innermost."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def _have_same_type(actual: object, expected: object) -> bool:
    """Compare types by their names, because a function can define a class in each call."""
    if isinstance(actual, Image.Image) and isinstance(expected, Image.Image):
        return True  # Their classes differ only by the file format.
    kind, expected_kind = type(actual), type(expected)
    return (kind.__module__, kind.__qualname__) == (expected_kind.__module__, expected_kind.__qualname__)


def _is_equal(actual: Any, expected: object, compared: Compared) -> bool:
    """Compare bits, so that a NaN equals itself, and memory formats, such as channels last."""
    if actual is expected and not isinstance(actual, Tensor | np.ndarray):
        return True
    if isinstance(expected, np.ndarray | np.generic) and not expected.dtype.hasobject:
        return (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(expected, Image.Image):  # Metadata such as the resolution is not compared.
        images = actual, expected
        content, expected_content = ((image.mode, image.size, image.getpalette(), image.tobytes()) for image in images)
        return content == expected_content
    if isinstance(expected, float):
        return struct.pack("d", actual) == struct.pack("d", expected)
    if isinstance(expected, int | str | bytes | set | frozenset):
        return bool(actual == expected)
    if (pair := (id(actual), id(expected))) in compared:  # The objects contain themselves.
        return True
    compared[pair] = actual, expected  # Keep both objects alive, so that their `id` is not reused.
    if isinstance(expected, Tensor) and expected.layout == actual.layout == torch.strided:
        is_equal = _tensor_content(actual) == _tensor_content(expected)
        return is_equal and not find_difference(_attributes(actual), _attributes(expected), compared=compared)
    return not find_difference(_pickled_state(actual), _pickled_state(expected), compared=compared)


def _tensor_content(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties and values of a strided tensor, without the attributes of a subclass."""
    is_plain = type(tensor) is Tensor
    with nullcontext() if is_plain else torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
        values = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.flatten()).view(torch.uint8)
        memory_format = [dim for dim in sort_dims_by_stride(tensor) if tensor.shape[dim] > 1]
        return tensor.requires_grad, tensor.dtype, tensor.shape, memory_format, values.numpy().tobytes()


def _attributes(tensor: Tensor) -> dict[str, object]:
    attributes = getattr(tensor, "__dict__", {})
    return {name: _without_ids(value) if name in MONAI_TRACES else value for name, value in attributes.items()}


def _without_ids(trace: object) -> object:
    if isinstance(trace, dict):
        return {key: _without_ids(value) for key, value in trace.items() if key != "id"}
    return list(map(_without_ids, trace)) if isinstance(trace, list) else trace


def _pickled_state(value: object) -> object:
    """Return the state that `pickle` would store, or the qualified name of an object that cannot be pickled."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # Any method of an object may fail.
        return getattr(value, "__qualname__", None)
    return [list(part) if isinstance(part, Iterator) else part for part in parts] if type(parts) is tuple else parts
