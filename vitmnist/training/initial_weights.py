"""Loads the weights that `init` names into a model that is built."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from vitmnist.errors import ConfigError, listed

log = logging.getLogger(__name__)

PREFIXES = {"module.", "_orig_mod.", "model.", "backbone."}
"""The first part of all names of a network within DataParallel, `torch.compile`, Lightning's modules and others."""


def load_initial_weights(model: nn.Module, weights: Mapping[str, Tensor], skip: Sequence[str]) -> None:
    """Load weights and statistics by their names in `state_dict()`.

    If the model has none of the names, a prefix is left out that all have but those to skip. If it still has none, they
    are those of the first of its parts that has some: a `backbone`.

    Args:
        skip: patterns of names that may differ; what they name is left as the model has it.

    Raises:
        ConfigError: names or shapes differ, a pattern fits none, or none of the weights is left.
    """
    own = model.state_dict()

    def is_skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    while not own.keys() & weights.keys():
        names = [name for name in weights if not is_skipped(name)] or weights
        prefixes = {name[: name.find(".") + 1] for name in names}
        if len(prefixes) != 1 or not prefixes <= PREFIXES:
            break
        log.info("init: all names begin with %s, which is left out", *prefixes)
        weights = {name.removeprefix(*prefixes): value for name, value in weights.items()}
    if not own.keys() & weights.keys():
        parts = [f"{name}." for name, _ in model.named_children()]
        part = next((part for part in parts if any(part + name in own for name in weights)), "")
        weights = {part + name: value for name, value in weights.items()}
    every = own.keys() | weights.keys()
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ConfigError(f"init_skip: {pattern!r} fits no weight; those of the model are {listed(own)}")
    same = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
    differing = [
        f"{name} ({_shape(weights, name)} in init, {_shape(own, name)} in the model)"
        for name in sorted(every - same.keys())
        if not is_skipped(name)
    ]
    if differing:
        raise ConfigError(
            f"init: the weights are not those of this model: {listed(differing)}; type what may differ as "
            "init_skip='[NAME,PATTERN.*]', or name other weights"
        )
    if not same:
        raise ConfigError(
            f"init_skip={[*skip]}: leaves nothing of init, none of whose weights has a name and shape of the model; "
            "set init=null, or name other weights"
        )
    model.load_state_dict(same, strict=False)
    log.info("started from %d of %d weights of init; the model has %d", len(same), len(weights), len(own))


def _shape(weights: Mapping[str, Tensor], name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "missing"
