"""Starts one run in several processes.

`torchrun` starts the same command line several times. Rank 0 behaves as a single process and publishes its arguments
and the folder that Hydra created; the other ranks compose the same configuration, and log to `rank-N.log` there.
"""

from __future__ import annotations

import os
from pathlib import Path

import vitmnist
from vitmnist.cli.messages import refuse_flags
from vitmnist.cli.overrides import expand, split
from vitmnist.cli.recorded import literal
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


def hydra_arguments(world: SingleProcess, typed: list[str]) -> list[str] | None:
    """The arguments for Hydra; None after `--version`, and on other ranks if rank 0 ended without a run (`--help`).

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
        if "--version" in typed:
            print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
            return None
        refuse_flags(typed)
        arguments = expand(typed)
        world.publish("arguments", [typed, arguments])
        return arguments
    folder = world.wait_for("folder")
    if folder is None:
        world.publish(f"released {world.rank}", True)
        return None
    typed_by_main, arguments = world.wait_for("arguments")
    # `run` compares the configurations and names what differs. Only the data may be elsewhere on another machine.
    own = [argument for argument in typed if argument.startswith("data.root=")]
    is_same = {*typed} - {*own} == {argument for argument in typed_by_main if not argument.startswith("data.root=")}
    options, overrides = split(arguments if is_same else typed)
    log_to = [f"hydra.job.name=rank-{world.rank}", "hydra.job_logging.root.handlers=[file]"]
    return [*overrides, *own, f"hydra.run.dir={literal(str(folder))}", "hydra.output_subdir=null", *log_to, *options]


def publish_folder(world: SingleProcess, folder: Path) -> None:
    """Let the other ranks start, in the folder of the run."""
    if world.is_main:
        world.publish("folder", str(folder.absolute()))


def release_ranks(world: SingleProcess) -> None:
    """Let the other ranks exit if there was no run, and wait for them: this process may host their key-value store."""
    if world.is_main and world.publish("folder", None) is None:
        for rank in range(1, world.size):
            world.wait_for(f"released {rank}")
