"""Composes the configuration from `conf/` and overrides, and names the folder of a run after the overrides."""

import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from vitmnist.config import CONF, is_group, parse_key
from vitmnist.config.schema import FREE_KEYS, Config
from vitmnist.errors import ConfigError


def make_run_label(overrides: Sequence[str]) -> str:
    """Return a name for a folder: `["data/loader=ram", "optimizer.lr=0.003"]` gives `ram-lr_0.003`.

    It needs no quotes, and has at most 40 characters: Windows limits a path to 260, and ignores a dot at the end.
    """
    parts = []
    for override in overrides:
        name, value = parse_key(override), override.partition("=")[2]
        short = name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in ("data.root", "repeats", "name", "tags", "notes"):
            parts.append(value if is_group(name) and "@" not in name else f"{short}_{value}")
    return re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join(parts))[:40].strip("._-") or "defaults"


def make_job_name(job: int, overrides: Sequence[str], constant_keys: Collection[str]) -> str:
    """Return the name of the folder of a job: its number, and what differs among the jobs of its sweep."""
    varied = [override for override in overrides if parse_key(override) not in constant_keys]
    return f"{job}-{make_run_label(varied)}" if varied else str(job)


# The resolvers convert the overrides to a plain list: a list of the configuration would resolve interpolations.
to_plain: Any = OmegaConf.to_container
OmegaConf.register_new_resolver("run_label", lambda overrides: make_run_label(to_plain(overrides)), replace=True)
OmegaConf.register_new_resolver(
    "job_name", lambda job, overrides, constant: make_job_name(job, to_plain(overrides), constant), replace=True
)
# Two runs can start in the same second, even with the same process ID in two containers.
OmegaConf.register_new_resolver("run_token", lambda: secrets.token_hex(3), use_cache=True, replace=True)
_schema = OmegaConf.structured(Config)
for _key in FREE_KEYS:  # Elsewhere, a new key is an error.
    OmegaConf.set_struct(OmegaConf.select(_schema, _key), False)
ConfigStore.instance().store(name="config_schema", node=_schema)


@contextmanager
def initialize_hydra() -> Iterator[None]:
    """Initialise Hydra for `conf/` in the block, and restore its state: the caller can be a program of Hydra."""
    composer = GlobalHydra.instance()
    states = [(holder, {**vars(holder)}) for holder in (composer, HydraConfig.instance(), VersionBase.instance())]
    composer.clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.set_instance(composer)  # `initialize_config_dir` replaces it by a copy.
        for holder, state in states:
            vars(holder).update(state)


def compose_command(overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Compose the overrides of a command line; call this in `initialize_hydra`.

    Returns:
        The configuration, and the section `hydra`. A key that a sweep varies has its default.

    Raises:
        ConfigError: `overrides` are a sweep, and `hydra.mode` is not MULTIRUN.
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    parsed = OverridesParser.create().parse_overrides([*overrides])
    varied = [str(override.input_line) for override in parsed if override.is_sweep_override()]
    constant = [override for override in overrides if override not in varied]
    composed = hydra.compose("config", constant, return_hydra_config=True)
    # Without Hydra's launcher, nobody else sets this; `${hydra:runtime.cwd}` in a value needs it.
    HydraConfig.instance().set_config(composed)
    if composed.hydra.mode != RunMode.MULTIRUN:
        if varied:
            raise ConfigError(
                f"{varied[0]}: is a sweep; add -m to run it, or brackets around the values of a list; in Python, call "
                "vitmnist.train for each value"
            )
        if composed.repeats > 1:
            raise ConfigError(f"repeats={composed.repeats}: repeats the jobs of a sweep; add -m")
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]), composed.hydra


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration with overrides; raises the exceptions of `compose_command`."""
    with initialize_hydra():
        return compose_command(overrides)[0]
