"""Starts one run in several processes.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process and publishes its arguments,
its folder and its configuration; the other ranks log to `rank-N.log` there.
"""

from __future__ import annotations

import os

import vitmnist
from vitmnist.cli.arguments import for_hydra
from vitmnist.cli.folders import Command
from vitmnist.cli.messages import refuse_flags
from vitmnist.cli.overrides import key_of, quoted, split, value_of
from vitmnist.config.labels import to_plain_dict
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError
from vitmnist.runtime.distributed import SINGLE_PROCESS, SingleProcess, launched


def connect_ranks() -> SingleProcess:
    """Connect this process to the other ranks, if there are any.

    Raises:
        ConfigError: they cannot be reached.
    """
    if not launched():
        return SINGLE_PROCESS
    from vitmnist.runtime.torch_distributed import TorchDistributed  # imports torch

    return TorchDistributed()


def hydra_arguments(world: SingleProcess, command: Command) -> list[str] | None:
    """The arguments for Hydra; None after `--version`, and on other ranks if rank 0 ended without a run (`--help`).

    Other ranks get the configuration of rank 0 in `command`, unless they were started with other arguments: then `run`
    compares the configurations and names what differs. Only the data may be elsewhere on another machine.

    Raises:
        ConfigError: the arguments cannot be used, or torchrun would restart the ranks of several machines.
        PeerError: rank 0 has refused them.
    """
    machines, restarts = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if machines > 1 and restarts:
        # torchrun counts restarts per machine, so the restarted processes could not tell which belong together.
        raise ConfigError(
            f"--max-restarts={restarts}: is for one machine, and these are {machines}; type --max-restarts=0, "
            "and resume=auto when you start it again"
        )
    if world.is_main:
        if "--version" in command.typed:
            print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
            return None
        refuse_flags(command.typed)
        arguments, command.resume = for_hydra(command.typed)
        return arguments
    started = world.wait_for("run")
    if started is None:
        world.publish(f"released {world.rank}", True)
        return None
    options, own = split(command.typed)
    if {one for one in command.typed if key_of(one) != "data.root"} == set(started["typed"]):
        if data_root := value_of("data.root", own):
            started["config"]["data"]["root"] = data_root
        command.config, own = validate(Config, started["config"]), []
    own = [one for one in own if key_of(one) not in ("resume", "hydra.run.dir")]
    log_to = [f"hydra.job.name=rank-{world.rank}", "hydra.job_logging.root.handlers=[file]"]
    return [*own, f"hydra.run.dir={quoted(started['folder'])}", *log_to, *options]


def publish_run(world: SingleProcess, command: Command) -> None:
    """Let the other ranks start with the configuration and in the folder of rank 0."""
    if world.is_main and command.output:
        typed = [one for one in command.typed if key_of(one) != "data.root"]
        config = to_plain_dict(command.config)
        world.publish("run", {"folder": str(command.output.path), "typed": typed, "config": config})


def release_ranks(world: SingleProcess) -> None:
    """Let the other ranks exit if there was no run, and wait for them: this process may host their key-value store."""
    if world.is_main and world.publish("run", None) is None:
        for rank in range(1, world.size):
            world.wait_for(f"released {rank}")
