"""Composes the configuration from `conf/` and overrides, and names the folder of a run after the overrides."""

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf

from vitmnist.config import CONF, is_group
from vitmnist.config.schema import Config


def run_label(overrides: Sequence[str] | ListConfig, folder: str = "outputs/runs/2026-11-27/12-00-00-abcdef") -> str:
    """Return a name for a folder: `["data/loader=ram", "batch_size=300"]` gives `ram-bs300`.

    It has at most 80 characters, and fewer if `folder`, the default folder of a run or a sweep, has a long path.
    Windows limits a path to 260 characters, allows few special characters, and ignores a dot at the end.
    """
    if isinstance(overrides, ListConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]  # Interpolations stay as typed.
    parts = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        short = "bs" if name == "batch_size" else name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in ("data.root", "repeats", "name", "tags", "notes"):
            parts.append(value if is_group(name) and "@" not in name else f"{short}{value}")
    # The number of a job adds up to 5 characters, and the files below add another 60.
    size = min(80, max(192 - len(os.path.abspath(folder)), 20))
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))[:size].rstrip(".") or "defaults"


_schema = OmegaConf.structured(Config)
# The keys of `lr_scale` are patterns; elsewhere a new key is an error.
OmegaConf.set_struct(_schema.lr_scale, False)
ConfigStore.instance().store(name="config_schema", node=_schema)
OmegaConf.register_new_resolver("run_label", run_label, replace=True)
# Two runs can start in the same second, even with the same process ID in two containers.
OmegaConf.register_new_resolver("run_token", lambda: secrets.token_hex(3), use_cache=True, replace=True)


@contextmanager
def separate_hydra() -> Iterator[None]:
    """Set the state of Hydra aside within the block: it belongs to the program, which can be one of Hydra itself."""
    composer, config, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    states = (version, "version_base"), (config, "cfg"), (composer, "hydra")
    values = [getattr(holder, name) for holder, name in states]
    composer.clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(composer)  # `initialize_config_dir` replaces it by a copy.
        for (holder, name), value in zip(states, values, strict=True):
            setattr(holder, name, value)


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration with overrides; raises the exceptions of Hydra and OmegaConf."""
    with separate_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))
