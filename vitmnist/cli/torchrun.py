"""Starts one run in several processes.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process and broadcasts its arguments
and the folder that Hydra created; the other ranks compose the same configuration, and log to `rank-N.log` there.
"""

from __future__ import annotations

import os
from typing import Any

import vitmnist
from vitmnist.cli.messages import refuse_flags
from vitmnist.cli.overrides import expand, split
from vitmnist.cli.recorded import literal
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


def hydra_arguments(world: World, typed: list[str]) -> list[str] | None:
    """The arguments for Hydra; None after `--version`, and on other ranks if rank 0 ends without a run (`--help`).

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
    if "--version" in typed:
        if world.is_main:
            print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
        return None

    def complete() -> list[list[str]]:
        refuse_flags(typed)
        return [typed, expand(typed)]

    typed_by_main, arguments = world.broadcast_object(complete)
    if world.is_main:
        return arguments  # type: ignore[no-any-return]
    start = world.broadcast_object(dict)
    if start is None:
        return None
    # `run` compares the configurations and names what differs. Only the data may be elsewhere on another machine.
    own = [argument for argument in typed if argument.startswith("data.root=")]
    is_same = {*typed} - {*own} == {argument for argument in typed_by_main if not argument.startswith("data.root=")}
    options, overrides = split(arguments if is_same else typed)
    log_to = [f"hydra.job.name=rank-{world.rank}", "hydra.job_logging.root.handlers=[file]"]
    folder = [f"hydra.run.dir={literal(start['folder'])}", "hydra.output_subdir=null"]
    return [*overrides, *own, *folder, *log_to, *options]


def start_ranks(world: World, start: dict[str, Any] | None) -> None:
    """Let the other ranks start with what rank 0 has decided, its `folder`; None lets them exit without a run."""
    if world.is_main:
        world.broadcast_object(lambda: start)
