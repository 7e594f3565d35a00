"""Preserves the buffers of a model while its training step is timed or compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers of a model on exit from the block, in which it trains. A `state_dict` lacks some of them."""
    saved = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:  # Read the buffers again, because `forward` can assign new ones.
        for buffer, value in zip(model.buffers(), saved, strict=True):
            buffer.detach().copy_(value)
