"""Keys that records of earlier versions have, and what they are called today."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

CURRENT_KEYS: dict[str, str | None] = {
    # 0.1
    "data.loader.resident": None,
    "data.loader.base.resident": None,
    "sweep": None,
    "trainer.cuda_graph": None,
}
"""The key or section of today for each that has moved; None: it is dropped, since it changed no result."""


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of a record of any version, by the keys of this one."""
    current = deepcopy(dict(values))
    for old, new in CURRENT_KEYS.items():
        *sections, name = old.split(".")
        parent: Any = current
        for section in sections:
            parent = parent.get(section) if isinstance(parent, dict) else None
        if isinstance(parent, dict) and name in parent:
            value = parent.pop(name)
            *sections, name = (new or "").split(".")
            if name:
                target = current
                for section in sections:
                    target = target.setdefault(section, {})
                target[name] = value
    return current
