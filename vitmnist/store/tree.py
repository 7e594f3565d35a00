"""Nested dicts, lists and tuples as their leaves and their structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DICTS = (dict, OrderedDict)


@dataclass(frozen=True)
class Structure:
    """How the leaves of a tree are nested.

    Args:
        kind: dict, OrderedDict, list, tuple or a named tuple; None is a leaf, as is an object of any other type.
        keys: of a dict.
        children: the structures of the values.
    """

    kind: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, None)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, such as `['image'][0]`."""
    return list(_named(tree, ""))


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The tree of this structure with these leaves."""
    return _build(iter(leaves), structure)


def tree_map(function: Callable[[Any], Any], tree: Any, leaf_type: type | None = None) -> Any:
    """A tree with `function` applied to each leaf; objects of `leaf_type` are leaves too."""
    leaves: list[Any] = []
    structure = _flatten(tree, leaves, leaf_type)
    return unflatten(map(function, leaves), structure)


def _flatten(tree: Any, leaves: list[Any], leaf_type: type | None) -> Structure:
    kind = type(tree)
    if kind is leaf_type or not (kind in DICTS or kind in (list, tuple) or _is_named_tuple(kind)):
        leaves.append(tree)
        return LEAF
    keys = tuple(tree) if kind in DICTS else ()
    values = tree.values() if kind in DICTS else tree
    return Structure(kind, keys, tuple([_flatten(value, leaves, leaf_type) for value in values]))


def _build(leaves: Iterator[Any], structure: Structure) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    values = [_build(leaves, child) for child in structure.children]
    if kind in DICTS:
        return kind(zip(structure.keys, values, strict=True))
    return kind(*values) if _is_named_tuple(kind) else kind(values)


def _named(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    kind = type(tree)
    if kind in DICTS:
        children = [(f"[{key!r}]", value) for key, value in tree.items()]
    elif _is_named_tuple(kind):
        children = [(f".{field}", value) for field, value in zip(tree._fields, tree, strict=True)]
    elif kind in (list, tuple):
        children = [(f"[{index}]", value) for index, value in enumerate(tree)]
    else:
        yield path, tree
        return
    for name, value in children:
        yield from _named(value, path + name)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


LEAF = Structure()
