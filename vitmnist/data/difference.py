"""Bitwise comparison of batches and samples of nested dicts, lists and tuples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path


def find_difference(found: Any, expected: Any) -> str | None:
    """Where two batches first differ, in structure, type, dtype, shape or a single bit; None if nowhere."""
    ours, our_structure = tree_flatten_with_path(found)
    theirs, structure = tree_flatten_with_path(expected)
    if our_structure != structure:
        return "the structure"
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        are_pictures = isinstance(one, Image.Image) and isinstance(other, Image.Image)  # of any file format
        if not (are_pictures or type(one) is type(other)) or not _is_same(one, other):
            return f"batch{keystr(path)}"
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Bitwise equality, so that a NaN equals itself; the memory format counts too, such as channels last."""
    if isinstance(other, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(other, Image.Image):  # without metadata, such as the resolution
        ours, theirs = ((image.mode, image.size, image.getpalette(), image.tobytes()) for image in (one, other))
        return ours == theirs
    if not isinstance(other, Tensor):
        return bool(one == other)
    if (one.shape, one.dtype, one.is_contiguous()) != (other.shape, other.dtype, other.is_contiguous()):
        return False
    one, other = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)
