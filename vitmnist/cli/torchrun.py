"""One run in several processes.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process, and broadcasts its arguments,
its folder and its configuration; the other ranks log to `rank-N.log` there.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from vitmnist.cli.arguments import AUTO_FORM, key_of, value_of, without_keys
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import to_plain_dict
from vitmnist.errors import ConfigError
from vitmnist.runtime.world import SINGLE_PROCESS, World, launched


def connect_ranks() -> World:
    """Connect this process to the other ranks, if there are any; raises `ConfigError` if they cannot be reached."""
    if not launched():
        return SINGLE_PROCESS
    from vitmnist.runtime.torch_world import TorchWorld  # imports torch

    return TorchWorld()


def check_restarts(typed: list[str]) -> None:
    """Raise `ConfigError` if torchrun would restart what cannot be resumed: it repeats the same arguments.

    It counts restarts per machine, so the restarted processes of several could not tell which belong together.
    """
    machines, restarts = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if machines > 1 and restarts:
        raise ConfigError(
            f"--max-restarts={restarts}: works on one machine, and there are {machines}; type --max-restarts=0 and "
            f"{AUTO_FORM}, and start it again yourself"
        )
    if restarts and "resume" not in map(key_of, typed):
        raise ConfigError(f"--max-restarts={restarts}: a restart would begin a new run; type {AUTO_FORM} as well")


def start_other_ranks(world: World, typed: list[str], folder: Path, config: Config) -> None:
    """Let the other ranks train in the folder and with the configuration of this one."""
    start = {"folder": str(folder), "typed": without_keys(typed, ["data.root"]), "config": to_plain_dict(config)}
    world.broadcast_object(lambda: start)


def follow_rank_0(world: World, typed: list[str]) -> tuple[Config, Path] | None:
    """The configuration and the folder of rank 0, on another rank; None if rank 0 ends without a run.

    Raises:
        ConfigError: this rank was started with other arguments. Only the data may be elsewhere on another machine.
    """
    start: dict[str, Any] | None = world.broadcast_object(dict)
    if start is None:
        return None
    if without_keys(typed, ["data.root"]) != start["typed"]:
        raise ConfigError(
            f"rank {world.rank} was started differently: {' '.join(typed)} (rank 0: {' '.join(start['typed'])}); "
            "start every rank with the same arguments"
        )
    if data_root := value_of("data.root", typed):
        start["config"]["data"]["root"] = data_root
    folder = Path(start["folder"])
    line = "%(asctime)s  %(message)s"
    logging.basicConfig(filename=folder / f"rank-{world.rank}.log", level=logging.INFO, format=line, force=True)
    return validate(Config, start["config"]), folder
