"""Composes the configuration from `conf/` and overrides, as Hydra does for the command line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from vitmnist.config import CONF
from vitmnist.config.schema import Config
from vitmnist.config.values import run_label

_schema = OmegaConf.structured(Config)
OmegaConf.set_struct(_schema.lr_scale, False)  # its keys are patterns; elsewhere a new key is an error
ConfigStore.instance().store(name="config_schema", node=_schema)
OmegaConf.register_new_resolver("run_label", run_label, replace=True)
# Two runs may start in the same second, in two containers with the same process id.
OmegaConf.register_new_resolver("run_token", lambda: secrets.token_hex(3), use_cache=True, replace=True)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration with these overrides; raises the exceptions of Hydra and OmegaConf."""
    hydra_context: AbstractContextManager[None] = nullcontext()
    if not GlobalHydra.instance().is_initialized():  # Hydra's own command line has done it, and twice is an error
        hydra_context = initialize_config_dir(str(CONF), version_base="1.3")
    with hydra_context:
        return hydra.compose("config", list(overrides))
