"""The command `train`: trains a run or a sweep. With torchrun, several processes run the same command line."""

from __future__ import annotations

import logging
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.utils import configure_log, env_override
from hydra.types import RunMode

import vitmnist
from vitmnist.cli.arguments import lazy_help_accepted, parse_arguments
from vitmnist.cli.command import TIMED_FORMAT, errors_as_messages, format_command
from vitmnist.cli.process import add_resume_hint, connected_ranks
from vitmnist.cli.start import ConfiguredRun, configure_run, log_results, start_run
from vitmnist.cli.sweep import run_sweep
from vitmnist.config import CONF, parse_key
from vitmnist.config.compose import compose, compose_command, initialize_hydra
from vitmnist.config.schema import Config, to_json_values
from vitmnist.config.validation import validate
from vitmnist.runtime.files import display_path
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.world import World

# Options of Hydra that print information and do not train.
PRINTING_OPTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@errors_as_messages()
def main() -> None:
    """Run the command line. With torchrun, all ranks train the run that rank 0 configures."""
    stop = StopSignal()
    with connected_ranks() as world:
        if world.broadcast_object(partial(handle_printing_options, sys.argv[1:])):
            return
        if world.is_main:
            run_command(stop, world)
        else:
            follow_main_rank(stop, world)


def handle_printing_options(argv: list[str]) -> bool:
    """Handle `--version`, `--help` and other options that only print; returns False without such an option."""
    # Hydra's `--version` would print the version of Hydra.
    if "--version" in argv:
        print(f"vitmnist {vitmnist.__version__}")
        return True
    options = parse_arguments(argv).options
    if not any(getattr(options, name) for name in PRINTING_OPTIONS):
        return False
    # Let Hydra raise errors instead of printing them.
    with env_override({"HYDRA_FULL_ERROR": "1"}), lazy_help_accepted():
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda composed: None)()
    return True


def run_command(stop: StopSignal, world: World) -> None:
    """Run the sweep or the run of the command line."""
    arguments = parse_arguments(sys.argv[1:])
    with initialize_hydra():
        values, hydra_values = compose_command(arguments.overrides_to_compose)
        if hydra_values.mode == RunMode.MULTIRUN:
            run_sweep(arguments, values, hydra_values, stop)  # This is an error if there are other ranks.
            return
        with configure_run(arguments, values, hydra_values) as run:
            world.broadcast_object(lambda: {"folder": str(run.folder), "config": to_json_values(run.config)})
            configure_log(hydra_values.job_logging, hydra_values.verbose)
            command = f"{format_command(world.size)} {shlex.quote(f'resume={display_path(run.folder)}')}"
            with add_resume_hint(run.folder, command):
                if start_run(run, stop, world):
                    log_results(run.folder)


def follow_main_rank(stop: StopSignal, world: World) -> None:
    """Train the run of rank 0 on another rank, which can be on another machine: it keeps its own `data.root`."""
    sent: dict[str, Any] = world.broadcast_object(dict)
    if roots := [text for text in sys.argv[1:] if parse_key(text) == "data.root"]:
        sent["config"]["data"]["root"] = compose(roots).data.root
    folder = Path(sent["folder"])
    folder.mkdir(parents=True, exist_ok=True)  # It can be missing on another machine.
    file = folder / f"rank-{world.rank}.log"
    logging.basicConfig(filename=file, encoding="utf-8", format=TIMED_FORMAT, level=logging.INFO, force=True)
    start_run(ConfiguredRun(validate(Config, sent["config"]), folder, []), stop, world)
