"""Nested dicts, lists and tuples as their leaves and their structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


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
