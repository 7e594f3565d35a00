"""Starts one run in several processes.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process and broadcasts its arguments,
its folder and its configuration; the other ranks log to `rank-N.log` there.
"""

from __future__ import annotations

import os
from typing import Any

import vitmnist
from vitmnist.cli.arguments import for_hydra
from vitmnist.cli.folders import Command
from vitmnist.cli.messages import refuse_flags
from vitmnist.cli.overrides import key_of, quoted, split, value_of
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import to_plain_dict
from vitmnist.errors import ConfigError
from vitmnist.runtime.world import SINGLE_PROCESS, World, launched


def connect_ranks() -> World:
    """Connect this process to the other ranks, if there are any.

    Raises:
        ConfigError: they cannot be reached.
    """
    if not launched():
        return SINGLE_PROCESS
    from vitmnist.runtime.torch_world import TorchWorld  # imports torch

    return TorchWorld()


def hydra_arguments(world: World, command: Command) -> list[str] | None:
    """The arguments for Hydra; None after `--version`, and on other ranks if rank 0 ends without a run (`--help`).

    Other ranks get the configuration of rank 0 in `command`, unless they were started with other arguments: then `run`
    compares the configurations and names what differs. Only the data may be elsewhere on another machine.

    Raises:
        ConfigError: the arguments cannot be used, or torchrun would restart the ranks of several machines.
    """
    machines, restarts = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if machines > 1 and restarts:
        # torchrun counts restarts per machine, so the restarted processes could not tell which belong together.
        raise ConfigError(
            f"--max-restarts={restarts}: is for one machine, and these are {machines}; type --max-restarts=0, "
            "and resume=auto when you start it again"
        )
    if "--version" in command.typed:
        if world.is_main:
            print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
        return None
    if world.is_main:
        refuse_flags(command.typed)
        arguments, command.resume = for_hydra(command.typed)
        return arguments
    start = world.broadcast_object(dict)
    if start is None:
        return None
    options, own = split(command.typed)
    if set(_without_data_root(command)) == set(start["typed"]):
        if data_root := value_of("data.root", own):
            start["config"]["data"]["root"] = data_root
        command.config, own = validate(Config, start["config"]), []
    own = [one for one in own if key_of(one) not in ("resume", "hydra.run.dir")]
    log_to = [f"hydra.job.name=rank-{world.rank}", "hydra.job_logging.root.handlers=[file]"]
    return [*own, f"hydra.run.dir={quoted(start['folder'])}", *log_to, *options]


def start_ranks(world: World, command: Command | None) -> None:
    """Let the other ranks start in the folder and with the configuration of rank 0; None lets them exit."""
    if world.is_main:
        world.broadcast_object(lambda: command and _start(command))


def _start(command: Command) -> dict[str, Any]:
    if not command.output or not command.config:
        raise LookupError("rank 0 has no folder yet")
    config = to_plain_dict(command.config)
    return {"folder": str(command.output.path), "typed": _without_data_root(command), "config": config}


def _without_data_root(command: Command) -> list[str]:
    return [one for one in command.typed if key_of(one) != "data.root"]
